"""dsa_select: the k best of one stretch's index keys for every query, in a running selection over blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from longstraw_jax.sharding import NO_POSITION, Stretch


class Candidates(NamedTuple):
    """The best keys so far of every query, in the order of (score descending, position ascending)."""

    scores: Float[Array, "*batch k"]
    """At least float32; -inf where there is none."""
    positions: Int[Array, "*batch k"]
    """int32; NO_POSITION where there is none."""

    @classmethod
    def none(cls, queries: int, k: int, dtype: DTypeLike) -> Candidates:
        """No candidate yet; `dtype` is that of the queries."""
        wide = jnp.promote_types(dtype, jnp.float32)
        return cls(jnp.full((queries, k), -jnp.inf, wide), jnp.full((queries, k), NO_POSITION, jnp.int32))

    def best(self, k: int) -> Candidates:
        """The k best. A sort by two keys: it asks no order of what comes in, and no backend for the way it breaks ties.

        Zeros of either sign are equal to `lax.sort`, and negative weights times relu's zeros make both.
        """
        falling, positions = lax.sort((-self.scores, self.positions), num_keys=2)
        return Candidates(-falling[..., :k], positions[..., :k])

    def with_more(self, scores: jax.Array, positions: jax.Array) -> Candidates:
        """As many candidates as before, the best of these and `scores` [Q, S] at `positions` [Q, S]."""
        every = Candidates(jnp.concatenate([self.scores, scores], -1), jnp.concatenate([self.positions, positions], -1))
        return every.best(self.scores.shape[-1])


def dsa_select(
    q: Float[Array, "Q H D"], w: Float[Array, "Q H"], positions: Int[Array, "Q"], keys: Stretch, block: int, candidates: Candidates
) -> Candidates:
    """`candidates`, and the visible keys of `keys` at hand, down to the k best: k is the number of candidates given.

    Args:
      q, w: the queries' index heads and their weights, scaled.
      positions: the queries' positions. A key is visible at its own position and later.
      keys: index keys [L, S, D]. Their rows may lie in any order.
      block: keys scored at a time, rounded down to a divisor of S. Memory is [Q, H, block], never [Q, S].
      candidates: what other stretches had to offer, or `Candidates.none`.

    The selection is exact, whatever the block; of equal scores the lowest position wins.
    """
    block = next(d for d in range(min(keys.count, block), 0, -1) if keys.count % d == 0)

    def one(j, candidates):
        at = keys.positions(j * block, block)
        visible = (at[None] <= positions[:, None]) & (at != NO_POSITION)[None]
        scores = jnp.where(visible, _scores(q, w, keys.read(j * block, block)), -jnp.inf)
        return candidates.with_more(scores, jnp.where(visible, at[None], NO_POSITION))

    blocks = -(-keys.covering(positions.max()) // block)
    return lax.fori_loop(0, blocks, one, candidates)


def dsa_merge(candidates: Candidates) -> Candidates:
    """The k best of several owners' candidates [N, Q, k] -> [Q, k]."""
    n, queries, k = candidates.scores.shape
    return Candidates(*(x.swapaxes(0, 1).reshape(queries, n * k) for x in candidates)).best(k)


def _scores(q: jax.Array, w: jax.Array, keys: jax.Array) -> jax.Array:
    """Scores [Q, S]. Keys times queries, so that the heads lie innermost and the weighted sum reads what the product wrote;
    the other way round XLA writes [Q, S, H] twice."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    x = jnp.einsum("sd,qhd->sqh", keys, q, precision=lax.Precision.HIGHEST, preferred_element_type=wide) * q.shape[-1] ** -0.5
    return (jax.nn.relu(x) * w[None].astype(wide)).sum(-1).T
