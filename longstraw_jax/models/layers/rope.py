"""Rotary position embedding (Su et al., 2021), half-split ("neox") form, on the first dimensions of each head."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from longstraw_jax.models.layers.numerics import statistics_dtype


def rotate_half_split(x: Float[Array, "T H D"], positions: Int[Array, "T"], rotary: int, theta: float) -> Float[Array, "T H D"]:
    """Rotates pairs (j, j + rotary/2), j < rotary/2, by position * theta^(-2j / rotary); the rest passes through.

    Angles are formed in the statistics dtype as in the PyTorch reference, and cos and sin cast to x's: at a million tokens a
    more exact angle would be another model than the one that sampled the responses.
    """
    wide, half = statistics_dtype(x.dtype), rotary // 2
    # on the host, step by step as PyTorch: XLA's power is off in the last digit, at two million tokens up to 0.06 radians
    frequencies = 1 / theta ** (np.arange(0, rotary, 2, dtype=wide) / rotary)
    angles = positions.astype(wide)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles).astype(x.dtype)[:, None], jnp.sin(angles).astype(x.dtype)[:, None]
    a, b, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
