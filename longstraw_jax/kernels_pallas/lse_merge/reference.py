"""The merge of partial attentions, as a formula (FlashAttention-2, Dao 2023, section 3.1; fp32 throughout).

    m = max_n lse_n,  w_n = exp(lse_n - m),  out = sum_n w_n o_n / sum_n w_n,  lse = m + log sum_n w_n
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def lse_merge_reference(partials: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """partials [N, T, H, D], lse [N, T, H] -> (output [T, H, D], LSE [T, H]), at least float32."""
    dtype = jnp.promote_types(partials.dtype, jnp.float32)
    partials, lse = partials.astype(dtype), lse.astype(dtype)
    top = lse.max(0)
    top = jnp.where(jnp.isfinite(top), top, 0)  # all partials empty: keeps exp(-inf - -inf) away
    weight = jnp.exp(lse - top[None])
    total = weight.sum(0)
    some = total > 0
    # a partial without weight may hold anything, NaN too
    out = (jnp.where(weight[..., None] > 0, partials, 0) * weight[..., None]).sum(0) / jnp.where(some, total, 1)[..., None]
    return out, jnp.where(some, top + jnp.log(jnp.where(some, total, 1)), -jnp.inf)


def pull_reference(partials, lse, out, merged, out_bar, merged_bar) -> tuple[jax.Array, jax.Array]:
    """The transpose at partials and lse of cotangents of the output and of the LSE; takes what the kernel's does."""
    return jax.vjp(lse_merge_reference, partials, lse)[1]((out_bar, merged_bar))
