"""dsa_select: the k best of one stretch's index keys for every query; dsa_merge: the k best of several owners'."""

from __future__ import annotations

import dataclasses
import functools

from jax import lax
from jaxtyping import Array, Float, Int

from longstraw_jax.kernels_pallas import check
from longstraw_jax.kernels_pallas.dispatch import Implementation, by_platform, choose
from longstraw_jax.kernels_pallas.dsa_select import blocked, kernel
from longstraw_jax.kernels_pallas.dsa_select.candidates import Candidates
from longstraw_jax.kernels_pallas.dsa_select.compare import compare
from longstraw_jax.sharding import Stretch


def dsa_select(
    q: Float[Array, "Q H D"], w: Float[Array, "Q H"], positions: Int[Array, "Q"], keys: Stretch, block: int, candidates: Candidates,
    implementation: Implementation = "auto",
) -> Candidates:
    """`candidates`, and the visible keys of `keys` at hand, down to the k best: k is the number of candidates given.

    Args:
      q, w: the queries' index heads and their weights, scaled.
      positions: the queries' positions. A key is visible at its own position and later.
      keys: index keys [L, S, D]. Their rows may lie in any order.
      block: keys that `xla` scores at a time, rounded down to a divisor of S; its memory is [Q, H, block], never [Q, S].
      candidates: what other stretches had to offer, or `Candidates.none`.
      implementation: `xla` sorts every block in; `pallas` only what can still be selected. float64 always runs as `xla`.

    The selection is exact, whatever the block; of equal scores the lowest position wins. It carries no gradient.

    Raises UnsupportedError if `pallas` is asked for and cannot take the inputs.
    """
    q, w, candidates = lax.stop_gradient((q, w, candidates))
    keys = dataclasses.replace(keys, rows=lax.stop_gradient(keys.rows))
    sizes = q.dtype.name, q.shape[1], q.shape[2], candidates.scores.shape[1]
    choice = choose("dsa_select", implementation, kernel.refusal(q, w, keys), functools.partial(check.fault, "dsa_select", compare, *sizes))

    def xla(*args):
        return blocked.select(*args[:3], keys, block, args[3])

    def pallas(*args, interpret):
        return kernel.select(*args[:3], keys, args[3], interpret=interpret)

    return xla(q, w, positions, candidates) if choice == "xla" else by_platform(choice, pallas, xla, q, w, positions, candidates)


def dsa_merge(candidates: Candidates) -> Candidates:
    """The k best of several owners' candidates [N, Q, k] -> [Q, k]."""
    n, queries, k = candidates.scores.shape
    return Candidates(*(x.swapaxes(0, 1).reshape(queries, n * k) for x in candidates)).best(k)
