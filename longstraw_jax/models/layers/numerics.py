"""The width of statistics: float32 beside bfloat16 or float32 activations, float64 beside float64."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype:
    """At least float32. Softmax statistics, recurrent states, log-softmax and gradient accumulators use it."""
    return jnp.promote_types(dtype, jnp.float32)
