"""lse_merge as two Pallas kernels, there and back: each reads the partials once, in tiles of rows (token, head).

Statistics, numerator and cotangents are float32 in registers. A program owns its rows for all N partials, so nothing is
exchanged and nothing is rounded in between. Partials without weight are never multiplied, whatever they hold.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from longstraw_jax.kernels_pallas.backend import triton

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_WIDEST = 4096
_NUMBERS = 2048
"""Of a tile: 16 of each of 128 threads, so that many programs are on a multiprocessor at a time and hide each other's loads."""
_TOGETHER = 4
"""Partials in a straight line of code: their loads are on their way at the same time."""


def refusal(partials: jax.Array, lse: jax.Array) -> str | None:
    """Why the kernels cannot take the inputs [N, T, H, D] and [N, T, H]; None if they can."""
    for name, x in (("partials", partials), ("lse", lse)):
        if x.dtype not in _DTYPES:
            return f"{name} are {x.dtype}; wanted bfloat16, float16 or float32"
    if partials.size == 0:
        return f"partials {partials.shape} are empty; wanted at least one number"
    return f"heads are {partials.shape[-1]} wide; wanted at most {_WIDEST}" if partials.shape[-1] > _WIDEST else None


def merge(partials: jax.Array, lse: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """partials [N, T, H, D], lse [N, T, H] -> (output [T, H, D], LSE [T, H]), float32."""
    n, t, h, d = partials.shape
    tile = _Tile.of(n, t * h, d)
    shapes = _float32(t * h, d), _float32(t * h)
    call = _call(_lse_merge, tile, ("nrd", "nr"), ("rd", "r"), shapes, interpret)
    out, merged = call(partials.reshape(n, t * h, d), lse.reshape(n, t * h))
    return out.reshape(t, h, d), merged.reshape(t, h)


def pull_merge(
    partials: jax.Array, lse: jax.Array, out: jax.Array, merged: jax.Array, out_bar: jax.Array, merged_bar: jax.Array, *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The transpose of `merge` at its inputs and results: cotangents of partials and lse, in their dtypes.

    With p_n = exp(lse_n - merged):  d o_n = p_n d out,  d lse_n = p_n (d out . (o_n - out) + d merged).
    """
    n, t, h, d = partials.shape
    tile = _Tile.of(n, t * h, d)
    shapes = jax.ShapeDtypeStruct((n, t * h, d), partials.dtype), jax.ShapeDtypeStruct((n, t * h), lse.dtype)
    rows = [x.reshape(t * h, -1) if x.ndim == 3 else x.reshape(-1) for x in (out, merged, out_bar, merged_bar)]
    call = _call(_pull_lse_merge, tile, ("nrd", "nr", "rd", "r", "rd", "r"), ("nrd", "nr"), shapes, interpret)
    bars = call(partials.reshape(n, t * h, d), lse.reshape(n, t * h), *rows)
    return bars[0].reshape(partials.shape), bars[1].reshape(lse.shape)


@dataclass(frozen=True)
class _Tile:
    """What one program works on: `rows` of `total` rows, all of their `true_width` entries, of `count` partials."""

    count: int
    total: int
    true_width: int
    rows: int
    width: int
    """Of the tile: a power of two."""

    @classmethod
    def of(cls, count: int, total: int, width: int) -> _Tile:
        padded = max(16, pl.next_power_of_2(width))
        return cls(count, total, width, min(max(1, _NUMBERS // padded), pl.next_power_of_2(total)), padded)

    def spec(self, axes: str) -> pl.BlockSpec:
        """A program's block of an array whose axes are some of `n` partials, `r` rows, `d` entries, in this order."""
        sizes = {"n": self.count, "r": self.rows, "d": self.width}
        return pl.BlockSpec([sizes[a] for a in axes], lambda i: tuple(i if a == "r" else 0 for a in axes))

    def each(self, one, carry):
        """`one(n, carry)` for every partial."""

        def together(j, carry):
            for i in range(_TOGETHER):
                carry = one(_TOGETHER * j + i, carry)
            return carry

        whole = self.count // _TOGETHER
        carry = lax.fori_loop(0, whole, together, carry)
        for n in range(_TOGETHER * whole, self.count):
            carry = one(jnp.int32(n), carry)
        return carry


@dataclass(frozen=True)
class _Here:
    """The running program's rows, as they are read and written."""

    rows: jax.Array
    """bool [rows]: which exist."""
    numbers: jax.Array
    """bool [rows, width]: which exist."""

    @classmethod
    def of(cls, tile: _Tile) -> _Here:
        rows = pl.program_id(0) * tile.rows + lax.iota(jnp.int32, tile.rows) < tile.total
        return cls(rows, rows[:, None] & (lax.iota(jnp.int32, tile.width) < tile.true_width)[None])

    def read_rows(self, ref, *partial) -> jax.Array:
        """[rows], of one partial where there are several; float32, 0 beyond the last."""
        return triton.load(ref.at[(*partial, ...)], mask=self.rows, other=0).astype(jnp.float32)

    def read(self, ref, *partial) -> jax.Array:
        """[rows, width], of one partial where there are several; float32, 0 beyond the last ones."""
        return triton.load(ref.at[(*partial, ...)], mask=self.numbers, other=0).astype(jnp.float32)

    def write_rows(self, x: jax.Array, ref, *partial) -> None:
        triton.store(ref.at[(*partial, ...)], x.astype(ref.dtype), mask=self.rows)

    def write(self, x: jax.Array, ref, *partial) -> None:
        triton.store(ref.at[(*partial, ...)], x.astype(ref.dtype), mask=self.numbers)


def _lse_merge(tile: _Tile, partials, lse, out, merged):
    """partials [N, rows, width], lse [N, rows] -> out [rows, width], merged [rows]."""
    here = _Here.of(tile)
    top = tile.each(lambda n, top: jnp.maximum(top, here.read_rows(lse, n)), jnp.full(tile.rows, -jnp.inf, jnp.float32))
    top = jnp.where(jnp.isfinite(top), top, 0)

    def add(n, carry):
        out, total = carry
        weight = jnp.exp(here.read_rows(lse, n) - top)
        part = jnp.where(weight[:, None] > 0, here.read(partials, n), 0)
        return out + part * weight[:, None], total + weight

    zeros = jnp.zeros((tile.rows, tile.width), jnp.float32), jnp.zeros(tile.rows, jnp.float32)
    numerator, total = tile.each(add, zeros)
    some = total > 0
    total = jnp.where(some, total, 1)
    here.write(numerator / total[:, None], out)
    here.write_rows(jnp.where(some, top + jnp.log(total), -jnp.inf), merged)


def _pull_lse_merge(tile: _Tile, partials, lse, out, merged, out_bar, merged_bar, partials_bar, lse_bar):
    """The formulas of `pull_merge` over [N, rows, width], [N, rows], [rows, width] and [rows]."""
    here = _Here.of(tile)
    merged, given = here.read_rows(merged), here.read(out_bar)
    base = jnp.where(jnp.isfinite(merged), merged, 0)  # all partials empty: exp(-inf - 0) is 0
    constant = here.read_rows(merged_bar) - (given * here.read(out)).sum(-1)

    def one(n, carry):
        p = jnp.exp(here.read_rows(lse, n) - base)
        part = jnp.where(p[:, None] > 0, here.read(partials, n), 0)
        here.write(given * p[:, None], partials_bar, n)
        here.write_rows(p * ((given * part).sum(-1) + constant), lse_bar, n)
        return carry

    tile.each(one, jnp.int32(0))


def _call(kernel, tile: _Tile, ins: tuple[str, ...], outs: tuple[str, ...], shapes, interpret: bool):
    """`ins` and `outs` name the arrays' axes, as `_Tile.spec` takes them."""
    return pl.pallas_call(
        functools.partial(kernel, tile), out_shape=shapes, grid=(pl.cdiv(tile.total, tile.rows),), interpret=interpret,
        in_specs=[tile.spec(axes) for axes in ins], out_specs=tuple(tile.spec(axes) for axes in outs),
        compiler_params=triton.CompilerParams(num_warps=4), name=kernel.__name__[1:])


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
