"""The conventional step by JAX: one autodiff pass per member over its whole sequence, through the family's plain reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.config import ObjectiveConfig
from longstraw_jax.loading import to_weights
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Model
from longstraw_jax.objective import member_weights
from longstraw_jax.policy import Policy
from longstraw_jax.types import Group


def autodiff_gradient(
    policy: Policy, group: Group, *, fixed: int = 0, old: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None, objective: ObjectiveConfig | None = None,
) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradient by checkpoint name) with the state of the first `fixed` positions held fixed; 0: of the whole sequence.

    Args are `replay`'s. On one device, every parameter whole: for small models.
    """
    objective = objective or ObjectiveConfig()
    names = set(parameters.to_host(policy.trainable, policy.model.abstract_parameters()[0]))
    weights = {name: jnp.asarray(x) for name, x in to_weights(policy).items()}
    trained = {name: weights.pop(name) for name in names}
    rows = _padded(group, objective, old, reference)
    settings = {name: getattr(objective, name) for name in ("clip_low", "clip_high", "kl_beta")}
    with jax.default_matmul_precision("highest"):
        loss, gradient = _loss_and_gradient(policy.model, fixed, old is None)(trained, weights, rows, settings)
    return float(loss), {name: np.asarray(x) for name, x in gradient.items()}


@functools.cache
def _loss_and_gradient(model: Model, fixed: int, on_policy: bool):
    """A program of (trained, the other weights, members' rows, settings). Weights are arguments: XLA folds constants for minutes."""

    def loss(trained, weights, rows, settings):
        def member(row):
            ids, start = jnp.concatenate([row["prompt"], row["ids"]]), row["prompt"].shape[0] - 1
            new = model.reference_logprobs(weights | trained, ids, fixed)[start:]
            ratio = jnp.exp(new - (jax.lax.stop_gradient(new) if on_policy else row["old"]))
            clipped = jnp.clip(ratio, 1 - settings["clip_low"], 1 + settings["clip_high"])
            gain, behind = jnp.minimum(ratio * row["advantage"], clipped * row["advantage"]), row["reference"] - new
            k3 = jnp.exp(behind) - behind - 1
            return -row["weight"] * (row["mask"] * (gain - settings["kl_beta"] * k3)).sum()

        return jax.lax.map(member, rows).sum()

    return jax.jit(jax.value_and_grad(loss))


def _padded(group: Group, objective: ObjectiveConfig, old, reference) -> dict[str, np.ndarray]:
    """Members as rows of one length; padding comes last, so that nothing real sees it."""
    longest = max(len(r.ids) for r in group.responses)

    def fill(rows):
        return np.stack([np.pad(np.asarray(row), (0, longest - len(row))) for row in rows])

    nothing = [np.zeros(len(r.ids)) for r in group.responses]
    return {"ids": fill([r.ids for r in group.responses]), "mask": fill([r.mask for r in group.responses]),
            "old": fill(old or nothing), "reference": fill(reference or nothing), "advantage": group.advantages,
            "weight": member_weights([group], objective.normalisation)[0], "prompt": np.tile(group.prompt_ids, (len(group.responses), 1))}
