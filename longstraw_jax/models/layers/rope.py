"""Rotary position embedding (Su et al., 2021) on the first dimensions of each head: half-split ("neox") and interleaved pairs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from longstraw_jax.models.layers.numerics import statistics_dtype


def rotate_half_split(x: Float[Array, "T H D"], positions: Int[Array, "T"], rotary: int, theta: float) -> Float[Array, "T H D"]:
    """Rotates pairs (j, j + rotary/2), j < rotary/2, by position * theta^(-2j / rotary); the rest passes through."""
    half = rotary // 2
    return _rotate(x[..., :half], x[..., half:rotary], x[..., rotary:], positions, theta)


def rotate_interleaved(x: Float[Array, "T H D"], positions: Int[Array, "T"], rotary: int, theta: float) -> Float[Array, "T H D"]:
    """Rotates pairs (2j, 2j + 1) by position * theta^(-2j / rotary) and writes them apart, first all first halves of a pair, then
    all second ones: so transformers' GLM does, queries and keys alike. The rest passes through.
    """
    return _rotate(x[..., 0:rotary:2], x[..., 1:rotary:2], x[..., rotary:], positions, theta)


def _rotate(a, b, rest, positions, theta: float):
    """The pairs (a, b), written as [a' | b' | rest].

    Angles are formed in the statistics dtype as in the PyTorch reference, and cos and sin cast to the activations': at a million
    tokens a more exact angle would be another model than the one that sampled the responses.
    """
    wide, pairs = statistics_dtype(a.dtype), a.shape[-1]
    # on the host, step by step as PyTorch. Powers are rounded from float64: XLA's, and NumPy's on some processors, are off in the
    # last digit, at two million tokens up to 0.06 radians
    powers = theta ** (np.arange(0, 2 * pairs, 2, dtype=wide) / (2 * pairs)).astype(np.float64)
    frequencies = 1 / powers.astype(wide)
    angles = positions.astype(wide)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles).astype(a.dtype)[:, None], jnp.sin(angles).astype(a.dtype)[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
