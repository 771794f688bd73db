"""dense_attention: attention of queries that all see all of the keys, and its log-normaliser."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas import check
from longstraw_jax.kernels_pallas.dense_attention import cudnn
from longstraw_jax.kernels_pallas.dense_attention.compare import compare
from longstraw_jax.kernels_pallas.dense_attention.reference import dense_attention_reference
from longstraw_jax.kernels_pallas.dispatch import Implementation, at_hand, choose


def dense_attention(
    q: Float[Array, "Q H D"], k: Float[Array, "S KV D"], v: Float[Array, "S KV D"], implementation: Implementation = "auto"
) -> tuple[Float[Array, "Q H D"], Float[Array, "Q H"]]:
    """softmax(q k^T / sqrt(D)) v without a mask; query head h reads key-value head h // (H / KV).

    Args:
      implementation: `xla` is the reference itself, with a matrix [H, Q, S] in memory; `cudnn` has none. Where this process has
        no GPU, `cudnn` is the reference too, so that whatever is built on it can be tested there.

    Returns:
      (output in q's dtype, LSE): the natural-log sum of exponentials of every row's scores, at least float32.

    It has no derivative: whoever merges several of these writes it out from the merged LSE (FlashAttention-2, Dao 2023,
    algorithm 2), and that of one alone would be another. Differentiating it raises UnsupportedError.

    Raises UnsupportedError if `cudnn` is asked for and cannot take the inputs.
    """
    return _attention(dense_choice(q, k.shape[1], implementation), q, k, v)


def dense_choice(q: Float[Array, "Q H D"], kv: int, implementation: Implementation = "auto") -> Implementation:
    """`xla` or `cudnn`: what runs `dense_attention` of q over `kv` key-value heads in the program that is being traced.

    For callers who have a better way for XLA than the reference. Raises as `dense_attention` does.
    """
    refusal = cudnn.refusal(q) if at_hand() == "gpu" else None
    sizes = q.dtype.name, q.shape[1], kv, q.shape[2]
    chosen = choose("dense_attention", implementation, refusal, functools.partial(check.fault, "dense_attention", compare, *sizes), "cudnn")
    return ("cudnn" if at_hand() == "gpu" else "xla") if chosen == "auto" else chosen


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(chosen: Implementation, q, k, v):
    return cudnn.attention(q, k, v) if chosen == "cudnn" and at_hand() == "gpu" else dense_attention_reference(q, k, v)


def _no_derivative(*_):
    raise UnsupportedError("dense_attention has no derivative; write it out from the merged log-normaliser, or differentiate "
                           "dense_attention_reference")


_attention.defvjp(_no_derivative, _no_derivative)
