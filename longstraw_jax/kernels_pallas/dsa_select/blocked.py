"""dsa_select for XLA: a running selection over blocks of keys, which are scored and sorted in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from longstraw_jax.kernels_pallas.dsa_select.candidates import Candidates
from longstraw_jax.sharding import NO_POSITION, Stretch


def select(q: jax.Array, w: jax.Array, positions: jax.Array, keys: Stretch, block: int, candidates: Candidates) -> Candidates:
    """As `api.dsa_select`. Memory is [Q, H, block]."""
    block = next(d for d in range(min(keys.count, block), 0, -1) if keys.count % d == 0)

    def one(j, candidates):
        at = keys.positions(j * block, block)
        visible = (at[None] <= positions[:, None]) & (at != NO_POSITION)[None]
        scores = jnp.where(visible, _scores(q, w, keys.read(j * block, block)), -jnp.inf)
        return candidates.with_more(scores, jnp.where(visible, at[None], NO_POSITION))

    blocks = -(-keys.covering(positions.max()) // block)
    return lax.fori_loop(0, blocks, one, candidates)


def _scores(q: jax.Array, w: jax.Array, keys: jax.Array) -> jax.Array:
    """Scores [Q, S]. Keys times queries, so that the heads lie innermost and the weighted sum reads what the product wrote;
    the other way round XLA writes [Q, S, H] twice."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    x = jnp.einsum("sd,qhd->sqh", keys, q, precision=lax.Precision.HIGHEST, preferred_element_type=wide) * q.shape[-1] ** -0.5
    return (jax.nn.relu(x) * w[None].astype(wide)).sum(-1).T
