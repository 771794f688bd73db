"""dense_attention, plainly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dense_attention_reference(
    q: Float[Array, "Q H D"], k: Float[Array, "S KV D"], v: Float[Array, "S KV D"]
) -> tuple[Float[Array, "Q H D"], Float[Array, "Q H"]]:
    """As `dense_attention`, with all scores in memory. Differentiable."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("qkgd,skd->qkgs", grouped, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    out = jnp.einsum("qkgs,skd->qkgd", p, v, preferred_element_type=wide)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])
