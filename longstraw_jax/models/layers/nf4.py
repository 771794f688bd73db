"""NF4: four-bit codes of normally distributed weights, a scale for every 64 of them (QLoRA, Dettmers et al., 2023, section 3).

A matrix [.., in] becomes codes [.., blocks, 32], two in a byte, and scales [.., blocks] in bfloat16. A block is 64 consecutive
inputs of one row, the last one filled up with zeros; its low halves of bytes are its first 32 weights, its high halves the rest.
So unpacking joins two pieces, and any shard of whole blocks is an NF4 matrix by itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.errors import InputError
from longstraw_jax.models.base import Packed
from longstraw_jax.models.layers.declare import Init, parameter
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.sharding import WHOLE, Owners, gather_whole

BLOCK = 64
"""Weights that share a scale."""

TABLE = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)
"""What the codes stand for, times the scale: quantiles of the normal distribution, and 0 (ibid., appendix E)."""

_EDGES = (TABLE[1:] + TABLE[:-1]) / 2


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of a matrix [.., in], on the host: the entries nearest to weight / scale, of two as near the lower.

    The scale is the largest magnitude of the block, rounded to bfloat16 before the codes are chosen; a block of zeros has scale 0
    and stays zero. Raises InputError where a weight is not finite.
    """
    scales = quantise_scales(weight)
    x = _blocks(weight)
    x /= np.where(scales == 0, 1, scales.astype(np.float32))[..., None]
    codes = np.zeros(x.shape, np.uint8)
    for edge in _EDGES:  # fifteen passes of comparisons are faster than a search for every weight
        codes += x > edge
    half = BLOCK // 2
    return codes[..., :half] | codes[..., half:] << 4, scales


def quantise_scales(weight: np.ndarray) -> np.ndarray:
    """The scales alone, [.., blocks] in bfloat16."""
    with np.errstate(over="ignore"):
        scales = np.abs(_blocks(weight)).max(-1).astype(ml_dtypes.bfloat16)
    if not np.isfinite(scales.astype(np.float32)).all():
        raise InputError("not all of its weights are finite in bfloat16; NF4 wants finite weights")
    return scales


def _blocks(weight: np.ndarray) -> np.ndarray:
    """A float32 copy, [.., blocks, 64]."""
    *lead, features = weight.shape
    x = np.zeros((*lead, blocks_of(features) * BLOCK), np.float32)
    x[..., :features] = weight
    return x.reshape(*lead, -1, BLOCK)


def blocks_of(features: int) -> int:
    """Blocks in a row of so many inputs."""
    return -(-features // BLOCK)


def dequantise(codes: jax.Array, scales: jax.Array, features: int, dtype) -> jax.Array:
    """The matrix [.., features] in `dtype`, multiplied out in the statistics dtype.

    By a look into the table: a chain of selections instead keeps many pieces of the matrix at once (4 GB at the published size).
    """
    wide = statistics_dtype(dtype)
    pairs = jnp.concatenate([codes & 15, codes >> 4], -1).astype(jnp.int32)
    x = jnp.asarray(TABLE, wide)[pairs] * scales.astype(wide)[..., None]
    return x.astype(dtype).reshape(*codes.shape[:-2], -1)[..., :features]


class Nf4Matrix(nnx.Module):
    """Declares a frozen matrix [.., out, in] as codes and scales, both split where a plain matrix would be."""

    def __init__(self, shape: tuple[int, ...], dtype, axes: tuple[str | None, ...], init: Init):
        *lead, features = shape
        self.shape = shape
        blocks = blocks_of(features)

        def part(name, shape, dtype_, axes):
            return parameter(shape, dtype_, axes, init, packed=Packed(name, features, np.dtype(dtype)))

        self.codes = part("codes", (*lead, blocks, BLOCK // 2), jnp.uint8, (*axes, WHOLE))
        self.scales = part("scales", (*lead, blocks), jnp.bfloat16, axes)

    def whole(self, owners: Owners, dtype) -> Float[Array, "out in"]:
        """The matrix; what travels between the owners is codes and scales."""
        return whole_matrix(self.codes[...], self.scales[...], self.shape, owners, dtype)


def whole_matrix(
    codes: jax.Array, scales: jax.Array, shape: tuple[int, int], owners: Owners, dtype
) -> Float[Array, "out in"]:
    """The matrix of `shape` from the owners' shards."""
    features_out, features_in = shape
    blocks = blocks_of(features_in)
    codes = gather_whole(codes, (features_out, blocks, BLOCK // 2), owners)
    return dequantise(codes, gather_whole(scales, (features_out, blocks), owners), features_in, dtype)
