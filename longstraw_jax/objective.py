"""The clipped GRPO surrogate, token by token, its normalisations, and the figures a user watches."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from longstraw_jax.config import ObjectiveConfig
from longstraw_jax.types import Group

# exp(20) = 4.9e8: beyond it a ratio says only "far off", and an overflow would turn the gradient into NaN
_MAX_LOG_RATIO = 20.0


def token_losses(
    logprobs: Float[Array, "*T"], old: Float[Array, "*T"], reference: Float[Array, "*T"], mask: Bool[Array, "*T"],
    advantage: Float[Array, ""], settings: dict[str, Float[Array, ""]],
) -> Float[Array, "*T"]:
    """Minus the summand of GRPO (Shao et al., 2024, eq. 3), 0 where masked:

        -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_beta k3,   rho = exp(logprob - old)
        k3 = exp(ref - logprob) - (ref - logprob) - 1   (Schulman, 2020: never negative, gradient of the KL divergence)

    Masked entries may hold anything. Log-ratios are held within +-20.
    """
    logprobs, old, reference = (jnp.where(mask, x, 0) for x in (logprobs, old, reference))
    ratio = jnp.exp(jnp.clip(logprobs - old, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1 - settings["clip_low"], 1 + settings["clip_high"])
    behind = jnp.clip(reference - logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    k3 = jnp.exp(behind) - behind - 1
    return jnp.where(mask, settings["kl_beta"] * k3 - jnp.minimum(ratio * advantage, clipped * advantage), 0)


def loss_and_slope(logprobs, old, reference, mask, advantage, weight, settings) -> tuple[Array, Array]:
    """(weighted sum of `token_losses`, its derivative by each log-probability)."""
    return jax.value_and_grad(lambda x: weight * token_losses(x, old, reference, mask, advantage, settings).sum())(logprobs)


def member_weights(groups: Sequence[Group], normalisation: str) -> list[np.ndarray]:
    """What each response's summed token losses are multiplied by, per group; the groups of a step are averaged.

    A masked token leaves the denominator too, except in `dr_grpo`, whose denominator is the longest response's length.
    A response that is masked altogether weighs 0 and still counts as a member of its group.
    """
    trained = [np.array([r.mask.sum() for r in group.responses], np.float64) for group in groups]
    members = [len(group.responses) for group in groups]
    if normalisation == "dapo":
        total = sum(t.sum() for t in trained)
        return [np.full(n, 1 / total if total else 0.0) for n in members]
    if normalisation == "dr_grpo":
        longest = max(len(r.ids) for group in groups for r in group.responses)
        return [np.where(t > 0, 1 / (longest * n), 0) / len(groups) for t, n in zip(trained, members, strict=True)]
    return [np.where(t > 0, 1 / np.maximum(t, 1), 0) / n / len(groups) for t, n in zip(trained, members, strict=True)]


def settings_of(config: ObjectiveConfig, dtype) -> dict[str, Array]:
    """The objective's numbers as program arguments: changing one compiles nothing."""
    return {name: jnp.asarray(getattr(config, name), dtype) for name in ("clip_low", "clip_high", "kl_beta", "temperature")}


def metrics(
    logprobs: Sequence[np.ndarray], old: Sequence[np.ndarray], reference: Sequence[np.ndarray] | None, group: Group,
    config: ObjectiveConfig,
) -> dict[str, float]:
    """Figures over a group's trained tokens: ratio (mean, largest), share clipped, KL to the old policy (k1) and the reference (k3)."""
    keep = np.concatenate([r.mask for r in group.responses])
    new, before = (np.concatenate(list(x)).astype(np.float64)[keep] for x in (logprobs, old))
    if not len(new):
        return {"trained_tokens": 0}
    advantages = np.repeat(group.advantages, [len(r.ids) for r in group.responses])[keep]
    ratio = np.exp(np.clip(new - before, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    clipped = np.where(advantages > 0, ratio > 1 + config.clip_high, (advantages < 0) & (ratio < 1 - config.clip_low))
    figures = {"trained_tokens": len(new), "ratio_mean": ratio.mean(), "ratio_max": ratio.max(), "clip_fraction": clipped.mean(),
               "kl_old_k1": (before - new).mean(), "logprob_mean": new.mean()}
    if reference is not None:
        behind = np.concatenate(list(reference)).astype(np.float64)[keep] - new
        figures["kl_reference_k3"] = (np.exp(behind) - behind - 1).mean()
    return {name: float(x) if name != "trained_tokens" else int(x) for name, x in figures.items()}
