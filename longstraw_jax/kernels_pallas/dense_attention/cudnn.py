"""dense_attention by cuDNN's flash attention, which JAX brings along.

The call goes through a module that is private to JAX. The public `jax.nn.dot_product_attention` rounds the log-normaliser to the
inputs' dtype: with bfloat16, at a value of 12, by up to 0.03, and so every weight in a merge by 3%. Of the kernels that were
looked at beside it, JAX's own Pallas attention takes no bfloat16 in 0.10.2 and 0.12 (its buffers are float16), and tokamax can
be installed next to this package with Python 3.12 only.

Nobody promises that a private function stays as it is; the comparison before its first use (`check`) is what holds it.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp

_DTYPES = (jnp.bfloat16, jnp.float16)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q [Q, H, D], k and v [S, KV, D] -> (output [Q, H, D], LSE [Q, H] in float32)."""
    fused = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    out, lse = fused.dot_product_attention(
        q[None], k[None], v[None], scale=q.shape[-1] ** -0.5, mask_type=fused.MaskType.NO_MASK, return_residual=True)
    return out[0], lse[0].T


def refusal(q: jax.Array) -> str | None:
    """Why cuDNN cannot attend with q [Q, H, D]; None if it might."""
    return None if q.dtype in _DTYPES else f"queries are {q.dtype}; wanted bfloat16 or float16"
