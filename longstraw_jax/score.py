"""Score: log-probabilities of responses from the boundary, for the old policy or the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longstraw_jax.config import ObjectiveConfig
from longstraw_jax.errors import InputError
from longstraw_jax.gradients import zero_gradient
from longstraw_jax.members import pack, run_members, unpack
from longstraw_jax.policy import Policy
from longstraw_jax.state import ResidentState
from longstraw_jax.types import Response


def score(policy: Policy, state: ResidentState, responses: Sequence[Response], *, temperature: float = 1.0) -> list[np.ndarray]:
    """log p(r_t | prompt, r_<t) of every response token under `policy`: one array [R_i] per response, natural logarithm.

    The program is replay's own, without its backward steps. Raises InputError where the state was captured under another
    policy or there is no response.
    """
    if not responses:
        raise InputError("no responses to score; wanted at least one")
    state.check(policy)
    members = pack(policy.model, state.last_token, responses)
    objective = ObjectiveConfig(temperature=temperature)
    result = run_members(policy, state, members, zero_gradient(policy), objective, backward=False)
    return unpack(result.logprobs, responses)
