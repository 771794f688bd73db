"""dense_attention by cuDNN's flash attention, which JAX brings along, and the check that it does what is wanted of it.

The call goes through a module that is private to JAX. The public `jax.nn.dot_product_attention` rounds the log-normaliser to the
inputs' dtype: with bfloat16, at a value of 12, by up to 0.03, and so every weight in a merge by 3%. Of the kernels that were
looked at beside it, JAX's own Pallas attention takes no bfloat16 in 0.10.2 and 0.12 (its buffers are float16), and tokamax can
be installed next to this package with Python 3.12 only.

Nobody promises that a private function stays as it is. So before it is used, the GPU at hand has to show at the very heads and
width in question that it gives the plain formula's numbers; where it does not, or raises anything, XLA attends instead.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas.dense_attention.reference import dense_attention_reference

_DTYPES = (jnp.bfloat16, jnp.float16)
_QUERIES, _KEYS = 256, 1024
"""Of the check."""
_FAR = 1e-3
"""Between log-normalisers: products of 16-bit numbers are exact in float32, which leaves its rounding and that of exp."""


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q [Q, H, D], k and v [S, KV, D] -> (output [Q, H, D], LSE [Q, H] in float32)."""
    fused = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    out, lse = fused.dot_product_attention(
        q[None], k[None], v[None], scale=q.shape[-1] ** -0.5, mask_type=fused.MaskType.NO_MASK, return_residual=True)
    return out[0], lse[0].T


def refusal(q: jax.Array, kv: int) -> str | None:
    """Why this machine's GPU cannot attend with q [Q, H, D] to rows of `kv` heads by cuDNN; None if it can."""
    if q.dtype not in _DTYPES:
        return f"queries are {q.dtype}; wanted bfloat16 or float16"
    return fault(q.dtype.name, q.shape[1], kv, q.shape[2])


@functools.cache
def fault(dtype: str, heads: int, kv: int, width: int) -> str | None:
    """What is wrong with `attention` of so many heads on the GPU at hand; None if it gives the plain formula's numbers.

    It runs once for each kind of heads, when the first program that has them is traced. Where the check fails one warning says
    so; among several processes it is an error, since the others would compile another program and wait for this one for ever.
    """
    with ThreadPoolExecutor(1) as apart:  # in this thread a trace is going on, and would take the check in
        found = apart.submit(_compare, dtype, heads, kv, width).result()
    if found and jax.process_count() > 1:
        raise UnsupportedError(f"cuDNN's attention in process {jax.process_index()}: {found}; ask for implementation 'xla' everywhere")
    if found:
        warnings.warn(f"attention over the prompt runs as XLA, which is slower: cuDNN's {found}", RuntimeWarning, stacklevel=2)
    return found


def _compare(dtype: str, heads: int, kv: int, width: int) -> str | None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((_QUERIES, heads, width), *[(_KEYS, kv, width)] * 2))
    try:
        out, lse = jax.jit(attention)(q, k, v)
        out = np.asarray(out, np.float32)
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    with jax.default_matmul_precision("highest"):
        wanted, wanted_lse = (np.asarray(x, np.float32) for x in jax.jit(dense_attention_reference)(q, k, v))
    off, off_lse = np.abs(out - wanted).max() / np.abs(wanted).max(), np.abs(np.asarray(lse) - wanted_lse).max()
    if off <= 4 * float(jnp.finfo(dtype).eps) and off_lse <= _FAR:  # written so that NaN fails
        return None
    return f"differs from the plain formula by {off:.2g} of the largest number in the output and by {off_lse:.2g} in the log-normaliser"
