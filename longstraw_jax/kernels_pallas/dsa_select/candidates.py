"""The best keys so far of every query, and how more of them are taken in."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from longstraw_jax.sharding import NO_POSITION


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

    def worst(self) -> tuple[Float[Array, "*batch"], Int[Array, "*batch"]]:
        """(score, position) that a key must beat to be taken in. It asks no order of what came in."""
        score = self.scores.min(-1)
        return score, jnp.where(self.scores == score[..., None], self.positions, -1).max(-1)
