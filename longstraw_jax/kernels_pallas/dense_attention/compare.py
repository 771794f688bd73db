"""dense_attention's kernel against its reference, on the machine at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.kernels_pallas.check import differs
from longstraw_jax.kernels_pallas.dense_attention import cudnn
from longstraw_jax.kernels_pallas.dense_attention.reference import dense_attention_reference

_QUERIES, _KEYS = 256, 1024
_LSE = 1e-4
"""Products of 16-bit numbers are exact in float32, which leaves its rounding and that of the exponential."""


def compare(dtype: str, heads: int, kv: int, width: int) -> str | None:
    """How far output or LSE are; None if no more than rounding."""
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((_QUERIES, heads, width), *[(_KEYS, kv, width)] * 2)]
    (out, lse), (wanted, wanted_lse) = (jax.jit(f)(*given) for f in (cudnn.attention, dense_attention_reference))
    out, wanted = (x.astype(jnp.float32) for x in (out, wanted))
    return differs([out], [wanted], 4 * float(jnp.finfo(dtype).eps)) or differs([lse], [wanted_lse], _LSE)
