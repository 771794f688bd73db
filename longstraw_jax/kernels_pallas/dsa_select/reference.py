"""The indexer's scores and the choice among them, as formulas (DeepSeek-V3.2, DeepSeek-AI 2025, eq. 1).

    I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s] / sqrt(D))

The weights come scaled. Products and sums are float32 at least.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from longstraw_jax.sharding import NO_POSITION


def dsa_scores_reference(q: jax.Array, w: jax.Array, keys: jax.Array) -> jax.Array:
    """q [Q, H, D], w [Q, H], keys [S, D] -> scores [Q, S]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    x = jnp.einsum("qhd,sd->qhs", q.astype(wide), keys.astype(wide)) * q.shape[-1] ** -0.5
    return jnp.einsum("qh,qhs->qs", w.astype(wide), jax.nn.relu(x))


def dsa_select_reference(
    q: jax.Array, w: jax.Array, queries: jax.Array, keys: jax.Array, positions: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """(scores [Q, k], positions [Q, k]) of the k keys with the highest scores among those at `positions` [S] <= `queries` [Q].

    Highest first; of equal scores the lowest position first. -inf and NO_POSITION where fewer than k keys are visible.
    """
    visible = (positions[None] <= queries[:, None]) & (positions != NO_POSITION)[None]
    scores = jnp.where(visible, dsa_scores_reference(q, w, keys), -jnp.inf)
    where = jnp.where(visible, positions[None].astype(jnp.int32), NO_POSITION)
    short = max(0, k - len(positions))
    scores = jnp.pad(scores, ((0, 0), (0, short)), constant_values=-jnp.inf)
    where = jnp.pad(where, ((0, 0), (0, short)), constant_values=NO_POSITION)
    falling, where = lax.sort((-scores, where), num_keys=2)
    return -falling[:, :k], where[:, :k]
