"""lse_merge: one attention output from the partial outputs of several owners of keys."""

from __future__ import annotations

from jaxtyping import Array, Float

from longstraw_jax.kernels_pallas.lse_merge.reference import lse_merge_reference


def lse_merge(partials: Float[Array, "N T H D"], lse: Float[Array, "N T H"]) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Merges N normalised partial attentions, each over its own keys, into the attention over all keys.

    Args:
      partials: softmax-weighted values per owner, each normalised over that owner's keys.
      lse: natural-log sum of exponentials of each owner's scores; -inf where the owner had no visible key.

    Returns:
      (output, LSE), at least float32: numerator, maximum and denominator are never narrower. A row without any key gives 0
      and -inf.
    """
    return lse_merge_reference(partials, lse)
