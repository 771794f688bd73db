"""dsa_select with a Pallas kernel that scores keys and keeps those that can still be selected.

A sort of every block's scores is what costs most in a running selection, and few of them survive it: of keys in no particular
order the n-th is among the k best so far with probability k / n. So the kernel compares each score with the worst of the
query's candidates and appends what beats it, packed, to the query's buffer. A program stops where a block's survivors no longer
fit and remembers where; XLA sorts the buffers into the candidates, and the next round goes on from there with higher
thresholds. The buffers decide how many rounds there are, never what is selected: a block that does not fit is left whole for
the next round, and one block always fits an empty buffer. With room for 3 k survivors, keys in no particular order take 3
rounds where there are 65,536 of them and 7 where there are two million (simulated, k = 2,048, as `Tiling.of` cuts them); keys
in rising order of their scores, the worst case, S / (3 k).

Against a search for the k-th score by counting (radix selection): that scores every key once per digit, has ties to settle by
position afterwards, and needs a sort in the end all the same. Here each key is scored once, but for the block at which a
program stopped, and ties are settled by the one comparison (score, position) that the sort uses, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from longstraw_jax.errors import InputError
from longstraw_jax.kernels_pallas.backend import triton
from longstraw_jax.kernels_pallas.dsa_select.candidates import Candidates
from longstraw_jax.sharding import NO_POSITION, Stretch

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_PROGRAMS = 132
"""Multiprocessors of the largest Hopper GPUs: fewer programs leave some idle."""
_WIDEST, _MOST_HEADS = 256, 1024


def refusal(q: jax.Array, w: jax.Array, keys: Stretch) -> str | None:
    """Why the kernel cannot take the inputs; None if it can."""
    for name, x in (("queries", q), ("weights", w), ("keys", keys.rows)):
        if x.dtype not in _DTYPES:
            return f"{name} are {x.dtype}; wanted bfloat16, float16 or float32"
    if q.size == 0 or keys.rows.size == 0:
        return f"queries {q.shape} or keys {keys.rows.shape} are empty; wanted at least one number"
    if q.shape[2] > _WIDEST or q.shape[1] > _MOST_HEADS:
        return f"{q.shape[1]} heads are {q.shape[2]} wide; wanted at most {_MOST_HEADS} of at most {_WIDEST}"
    return None


@dataclass(frozen=True)
class Tiling:
    """How the work is cut. All but `splits` are powers of two, as Triton asks."""

    queries: int
    """Of a program; at least 16, the smallest side of a tensor core's product."""
    keys: int
    """Scored at a time; at least 16."""
    splits: int
    """Programs that share the keys of the same queries, block by block in turn."""
    room: int
    """Survivors that a program can keep for a query; at least `keys`, or a block might never fit."""

    def __post_init__(self):
        if self.room < self.keys:
            raise InputError(f"room for {self.room} survivors of {self.keys} keys at a time; wanted at least as many")

    @classmethod
    def of(cls, queries: int, keys: int, k: int, dtype) -> Tiling:
        """For Q queries and S keys of one stretch, k candidates; `dtype` is that of the products.

        The largest tiles whose registers do not spill. float32 products run outside the tensor cores and take more of them.
        """
        most = (16, 32) if dtype == jnp.float32 else (64, 128)
        tile, block = (min(side, max(16, pl.next_power_of_2(n))) for side, n in zip(most, (queries, keys), strict=True))
        splits = max(1, min(_PROGRAMS // pl.cdiv(queries, tile), pl.cdiv(keys, 4 * block)))
        return cls(tile, block, splits, max(block, pl.cdiv(3 * k, splits)))


def select(
    q: jax.Array, w: jax.Array, positions: jax.Array, keys: Stretch, candidates: Candidates, *, interpret: bool,
    tiling: Tiling | None = None,
) -> Candidates:
    """As `api.dsa_select`. Memory is the buffers and their sort: [Q, k + about 3 k] scores and positions."""
    dtype = jnp.promote_types(q.dtype, keys.rows.dtype)
    tiling = tiling or Tiling.of(len(q), keys.count, candidates.scores.shape[1], dtype)
    work = _Work.of(q, w, positions, keys, tiling)

    def round(state):
        candidates, begun = state
        scores, at, count, begun = work.survivors(*candidates.worst(), begun, interpret)
        there = lax.broadcasted_iota(jnp.int32, scores.shape, 2) < count[..., None]  # what was not written may hold anything
        scores, at = jnp.where(there, scores, -jnp.inf), jnp.where(there, at, NO_POSITION)
        return candidates.with_more(*(x[: len(q)].reshape(len(q), -1) for x in (scores, at))), begun

    begun = jnp.zeros((len(work.blocks), tiling.splits), jnp.int32)
    return lax.while_loop(lambda state: work.unfinished(state[1]).any(), round, (candidates, begun))[0]


@dataclass(frozen=True)
class _Work:
    """The kernel's arguments, padded to whole tiles, and how they are cut."""

    q: jax.Array
    """[H, Q, D]"""
    w: jax.Array
    """[H, Q], float32"""
    positions: jax.Array
    """[Q], -1 where there is no query: it sees nothing."""
    rows: jax.Array
    """[L, S, D], whole: a layer taken out would be copied."""
    layer: jax.Array
    """[1]"""
    at: jax.Array
    """[S], positions of the rows."""
    blocks: jax.Array
    """[tiles]: blocks of keys that a tile's queries can see."""
    tiling: Tiling

    @classmethod
    def of(cls, q, w, positions, keys: Stretch, tiling: Tiling) -> _Work:
        (queries, _, width), tiles = q.shape, pl.cdiv(len(q), tiling.queries)
        more = tiles * tiling.queries - queries
        at = jnp.pad(keys.positions(jnp.int32(0), keys.count), (0, -keys.count % tiling.keys), constant_values=NO_POSITION)
        positions = jnp.pad(positions.astype(jnp.int32), (0, more), constant_values=-1)
        q = jnp.pad(q.swapaxes(0, 1), ((0, 0), (0, more), (0, max(16, pl.next_power_of_2(width)) - width)))
        w = jnp.pad(w.T.astype(jnp.float32), ((0, 0), (0, more)))
        # a last granule may be cut off, and a read beyond the rows is nobody's error on a GPU
        covering = jnp.minimum(keys.covering(positions.reshape(tiles, -1).max(1)), keys.count)
        blocks = (-(-covering // tiling.keys)).astype(jnp.int32)
        return cls(q, w, positions, keys.rows, keys.place.astype(jnp.int32)[None], at, blocks, tiling)

    def unfinished(self, begun: jax.Array) -> jax.Array:
        """bool [tiles, splits]: whether a program has a block left; `begun` are the numbers of those it is done with."""
        t = self.tiling
        return begun * t.splits + jnp.arange(t.splits, dtype=jnp.int32)[None] < self.blocks[:, None]

    def survivors(self, score, position, begun, interpret):
        """One round: (scores [Q, splits, room], positions, how many of them are there [Q, splits], begun [tiles, splits]).

        Args:
          score, position: [Q], what a key must beat.
        """
        t, (heads, queries, width) = self.tiling, self.q.shape
        more = queries - len(score)
        # as wide as the queries: what is beyond the rows' own width is masked
        rows = pl.BlockSpec((*self.rows.shape[:2], width), lambda i, s: (0, 0, 0))
        whole = functools.partial(pl.BlockSpec, memory_space=pl.ANY)
        of_queries = pl.BlockSpec((t.queries,), lambda i, s: (i,))
        buffer = pl.BlockSpec((t.queries, pl.Squeezed(), t.room), lambda i, s: (i, s, 0))
        one = pl.BlockSpec((1, 1), lambda i, s: (i, s))
        shape = jax.ShapeDtypeStruct
        return pl.pallas_call(
            functools.partial(_dsa_survivors, t, self.rows.shape),
            grid=(len(self.blocks), t.splits),
            in_specs=[
                pl.BlockSpec((heads, t.queries, width), lambda i, s: (0, i, 0)), pl.BlockSpec((heads, t.queries), lambda i, s: (0, i)),
                of_queries, of_queries, of_queries, rows, whole(), whole(), pl.BlockSpec((1,), lambda i, s: (i,)), one],
            out_specs=[buffer, buffer, pl.BlockSpec((t.queries, pl.Squeezed()), lambda i, s: (i, s)), one],
            out_shape=[
                shape((queries, t.splits, t.room), jnp.float32), shape((queries, t.splits, t.room), jnp.int32),
                shape((queries, t.splits), jnp.int32), shape(begun.shape, jnp.int32)],
            compiler_params=triton.CompilerParams(num_warps=4 if t.keys < 128 else 8, num_stages=3),
            interpret=interpret,
            name="dsa_survivors",
        )(self.q, self.w, self.positions, jnp.pad(score, (0, more)), jnp.pad(position, (0, more)), self.rows, self.layer, self.at,
          self.blocks, begun)


def _dsa_survivors(
    tiling: Tiling, true: tuple[int, ...], q, w, positions, score, position, rows, layer, at, blocks, begun,
    scores_out, positions_out, count_out, begun_out,
):
    """A program: its blocks of keys in turn, from where it stopped, until they end or their survivors do not fit.

    `true` is the shape of the rows [L, S, D]; tiles may be larger.
    """
    split, layer, stop = pl.program_id(1), layer[0], blocks[0]
    positions, score, position = positions[...][:, None], score[...][:, None], position[...][:, None]
    query = lax.broadcasted_iota(jnp.int32, (tiling.queries, tiling.keys), 0)

    def block(state):
        n, count, _ = state
        first = (n * tiling.splits + split) * tiling.keys
        x = _block_scores(tiling, true, q, w, rows, layer, first)
        where = at[pl.ds(first, tiling.keys)][None]
        keep = (x > score) | ((x == score) & (where < position))
        keep &= (where <= positions) & (where != NO_POSITION)
        keep, slot, grown, fits = _packed(keep, count, tiling.room)
        triton.store(scores_out.at[query, slot], x, mask=keep)
        triton.store(positions_out.at[query, slot], jnp.broadcast_to(where, x.shape), mask=keep)
        return n + fits.astype(jnp.int32), grown, fits

    def goes_on(state):
        return (state[0] * tiling.splits + split < stop) & state[2]

    begin = begun[0, 0], jnp.zeros(tiling.queries, jnp.int32), jnp.bool_(True)
    n, count, _ = lax.while_loop(goes_on, block, begin)
    count_out[...] = count
    begun_out[0, 0] = n


def _packed(keep: jax.Array, count: jax.Array, room: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Where a block's survivors go, behind the `count` [Q] that are there: (keep, slot [Q, S], count, whether they fit).

    If one query's do not fit, none is kept. What is not kept has a slot beyond the buffer: interpreted, a masked store writes
    back what it finds, and must not find another's.
    """
    kept = keep.astype(jnp.int32)
    grown = count + kept.sum(1, dtype=jnp.int32)
    fits = grown.max() <= room
    keep &= fits
    slot = jnp.where(keep, count[:, None] + jnp.cumsum(kept, 1, dtype=jnp.int32) - 1, room)
    return keep, slot, jnp.where(fits, grown, count), fits


def _block_scores(tiling: Tiling, true: tuple[int, ...], q, w, rows, layer, first) -> jax.Array:
    """Scores [queries, keys] of a block of keys, head by head in registers: products and sums in float32."""
    width = q.shape[2]
    row = first + lax.broadcasted_iota(jnp.int32, (tiling.keys, width), 0)
    there = (row < true[1]) & (lax.broadcasted_iota(jnp.int32, row.shape, 1) < true[2])
    k = triton.load(rows.at[layer, pl.ds(first, tiling.keys), :], mask=there, other=0)
    dtype = jnp.promote_types(q.dtype, k.dtype)
    k = k.astype(dtype).T

    def head(h, total):
        x = lax.dot(q[h].astype(dtype), k, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32) * true[2]**-0.5
        return total + jnp.maximum(x, 0) * w[h][:, None]

    return lax.fori_loop(0, q.shape[0], head, jnp.zeros((tiling.queries, tiling.keys), jnp.float32))
