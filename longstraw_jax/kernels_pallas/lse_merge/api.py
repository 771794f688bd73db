"""lse_merge: one attention output from the partial outputs of several owners of keys."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float

from longstraw_jax.kernels_pallas import check
from longstraw_jax.kernels_pallas.dispatch import Implementation, choose
from longstraw_jax.kernels_pallas.lse_merge.compare import compare
from longstraw_jax.kernels_pallas.lse_merge.kernel import refusal
from longstraw_jax.kernels_pallas.lse_merge.reference import lse_merge_reference
from longstraw_jax.kernels_pallas.lse_merge.vjp import differentiable_merge


def lse_merge(
    partials: Float[Array, "N T H D"], lse: Float[Array, "N T H"], implementation: Implementation = "auto"
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Merges N normalised partial attentions, each over its own keys, into the attention over all keys.

    Args:
      partials: softmax-weighted values per owner, each normalised over that owner's keys.
      lse: natural-log sum of exponentials of each owner's scores; -inf where the owner had no visible key, whose partial may
        then hold anything.
      implementation: `xla` is the reference itself; float64 always runs as that.

    Returns:
      (output, LSE), at least float32: numerator, maximum and denominator are never narrower. A row without any key gives 0
      and -inf.

    Raises UnsupportedError if `pallas` is asked for and cannot take the inputs.
    """
    sizes = partials.shape[0], partials.shape[3], partials.dtype.name, lse.dtype.name
    choice = choose("lse_merge", implementation, refusal(partials, lse), functools.partial(check.fault, "lse_merge", compare, *sizes))
    return lse_merge_reference(partials, lse) if choice == "xla" else differentiable_merge(choice, partials, lse)
