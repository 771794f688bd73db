"""Replay: the group's responses once more, under autograd, one at a time; the gradient at the fixed resident state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longstraw_jax.config import GradientConfig, ObjectiveConfig
from longstraw_jax.errors import InputError
from longstraw_jax.gradients import zero_gradient
from longstraw_jax.members import pack, run_members, unpack
from longstraw_jax.models.base import Tree
from longstraw_jax.objective import member_weights, metrics
from longstraw_jax.policy import Policy
from longstraw_jax.state import ResidentState, StateCotangent, zero_cotangent
from longstraw_jax.types import Group


@dataclass(frozen=True)
class Replay:
    """What replay gives to the sweep, or to the update."""

    gradient: Tree
    """d loss / d trainable, summed over all owners, in the statistics dtype. At the prompt's fixed state as long as there is a
    `cotangent`: `sweep` adds the rest."""
    loss: float
    logprobs: list[np.ndarray]
    """One array [R_i] per response: the present policy's."""
    metrics: dict[str, float]
    """See `objective.metrics`."""
    cotangent: StateCotangent | None = None
    """d loss / d state, where the gradient goes on into the prompt."""


def replay(
    policy: Policy, state: ResidentState, group: Group, *, old: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None, objective: ObjectiveConfig | None = None, weights: np.ndarray | None = None,
    gradient: str | GradientConfig = "response", accumulator: Tree | None = None,
) -> Replay:
    """The GRPO loss of a group and its gradient with the prompt's state held fixed ("response" gradient, LongStraw 2026).

    Args:
      old: the old policy's log-probabilities per response; None means the present policy's, with ratio exactly 1.
      reference: the reference policy's, wanted where `objective.kl_beta` > 0.
      weights: [G] factors of the responses' summed losses; None takes the objective's normalisation over this group alone.
      gradient: with "full" the result also holds the state's cotangent, from which `sweep` takes the prompt's share.
      accumulator: a gradient to add to, for several groups in one step; it is used up.

    Raises InputError where the state is another prompt's or an older policy's, or log-probabilities have another length.
    """
    objective = objective or ObjectiveConfig()
    state.check(policy, group.prompt_ids)
    group.check(policy.model.vocabulary)
    if objective.kl_beta > 0 and reference is None:
        raise InputError(f"kl_beta is {objective.kl_beta} and no reference log-probabilities were given; score the responses "
                         "under the reference policy, or set kl_beta to 0")
    for name, rows in (("old", old), ("reference", reference)):
        _check_lengths(name, rows, group)
    weights = member_weights([group], objective.normalisation)[0] if weights is None else weights
    members = pack(
        policy.model, state.last_token, group.responses, old=old, reference=reference, advantages=group.advantages, weights=weights)
    sweeps = GradientConfig.of(gradient).reach(state.length) < state.length
    result = run_members(
        policy, state, members, zero_gradient(policy) if accumulator is None else accumulator, objective, backward=True,
        cotangent=zero_cotangent(policy, state) if sweeps else None)
    logprobs = unpack(result.logprobs, group.responses)
    figures = metrics(logprobs, logprobs if old is None else old, reference, group, objective)
    return Replay(result.gradient, float(np.asarray(result.losses).sum()), logprobs, figures, result.cotangent)


def _check_lengths(name: str, rows: Sequence[np.ndarray] | None, group: Group) -> None:
    if rows is None:
        return
    if len(rows) != len(group.responses):
        raise InputError(f"{name} log-probabilities for {len(rows)} responses; the group has {len(group.responses)}")
    for i, (row, response) in enumerate(zip(rows, group.responses, strict=True)):
        if len(row) != len(response.ids):
            raise InputError(f"{name} log-probabilities of response {i} have length {len(row)}; it has {len(response.ids)} tokens")
        if not np.isfinite(row).all():
            raise InputError(f"{name} log-probabilities of response {i} are not all finite")
