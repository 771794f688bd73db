"""Attention of a segment's queries over selected latent rows, spread over the owners; forward and backward written out.

Every query head attends to the same rows: the key is the whole row, the value its first entries (multi-head latent
attention with absorbed projections: DeepSeek-V2, DeepSeek-AI 2024, section 2.1.2). Each query's selected rows are taken one
by one out of the page buffers, a bounded number at a time, until none is left, with an online softmax; the partials of
several owners are joined by `lse_merge`. As in `paged_attention` the backward pass works from the merged log-normaliser and
adds the rows' cotangents in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from longstraw_jax.config import BlockSizes
from longstraw_jax.kernels_pallas import lse_merge
from longstraw_jax.models.base import Segment
from longstraw_jax.models.layers.expected import expected
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.selection import Exchange, at_hand, last_position
from longstraw_jax.models.layers.vocabulary import largest_divisor
from longstraw_jax.sharding import Owners, Stretch


@dataclass(frozen=True)
class Selected:
    """Who attends to what."""

    selection: Int[Array, "T K"]
    """Positions that each query selects, ascending. What is in the future or nowhere to be found counts for nothing."""
    segment: Segment
    sources: list[Stretch]
    """Latent rows [L, S, C], stretches in the order of their positions."""
    scale: float
    """Of the scores."""
    value_width: int
    """Leading entries of a row that are its value."""
    sizes: BlockSizes
    exchange: Exchange = "rounds"


def attend_selected(q: Float[Array, "T H C"], selected: Selected) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Attention of the owner's queries over their selected rows: (output in the latent space, in q's dtype; log-normaliser).

    A query that selects nothing gets 0 and -inf.
    """
    work = _Work.of(selected, q.shape[0])

    def one(i):
        runs = work.runs(i)
        out, lse = _partial(work.everyone(q, i), runs, selected, work.capacity)
        out, lse = lse_merge(*(work.parties.exchange(x.reshape(work.parties.count, -1, *x.shape[1:])) for x in (out, lse)))
        return out.astype(q.dtype), lse

    out, lse = lax.map(one, jnp.arange(work.tiles))
    return out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2])


def pull_attend_selected(
    q: Float[Array, "T H C"], out: Float[Array, "T H V"], lse: Float[Array, "T H"], cotangent: Float[Array, "T H V"],
    selected: Selected, gradients: list[Array | None],
) -> tuple[Float[Array, "T H C"], list[Array | None]]:
    """The transpose of `attend_selected`: (cotangent of q, `gradients` with the cotangents of each source's rows added).

    `gradients` are buffers [L, S, C] in the statistics dtype, or None for a source that takes none. With `fetch` the rows'
    cotangents are summed in a buffer of the fetched rows' size first, so that between owners, too, it is rows that travel.
    """
    work = _Work.of(selected, q.shape[0])
    delta = (out.astype(lse.dtype) * cotangent.astype(lse.dtype)).sum(-1)

    def one(i, carry):
        q_bar, buffers = carry
        everyone = [work.everyone(x, i) for x in (q, cotangent, lse, delta)]
        part, buffers = _pull_partial(*everyone, work.runs(i), buffers, selected, work.capacity)
        mine = work.parties.scatter_sum(part).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(q_bar, mine, i * work.tile, 0), buffers

    q_bar, buffers = lax.fori_loop(0, work.tiles, one, (jnp.zeros_like(q), work.buffers(gradients)))
    return q_bar, work.add_back(gradients, buffers)


class _Run(NamedTuple):
    """What a tile's queries select of one stretch at hand: entries first..stop of each query's `rows`."""

    stretch: Stretch
    rows: Int[Array, "Q K"]
    first: Int[Array, "Q"]
    stop: Int[Array, "Q"]
    share: int
    """Entries of a query's, were its selection spread evenly over the parties."""

    def rounds(self, capacity: int) -> jax.Array:
        """Rounds of `capacity` entries until no query has one left."""
        return expected(-(-(self.stop - self.first).max() // capacity), float(-(-self.share // capacity)))

    def round(self, r: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(rows [Q, capacity, C], which are there [Q, capacity], where they lie): zeros, and beyond the last row, elsewhere."""
        entry = self.first[:, None] + (r * capacity + jnp.arange(capacity, dtype=jnp.int32))[None]
        there = entry < self.stop[:, None]
        at = jnp.where(there, jnp.take_along_axis(self.rows, entry, 1, mode="clip"), self.stretch.count)
        return self.stretch.take(at), there, at


@dataclass(frozen=True)
class _Work:
    """How the segment's queries are cut, among whom they travel, and the rows that each party looks into."""

    selected: Selected
    parties: Owners
    stretches: list[Stretch]
    tile: int
    tiles: int
    capacity: int

    @classmethod
    def of(cls, selected: Selected, tokens: int) -> _Work:
        sizes, k = selected.sizes, selected.selection.shape[1]
        parties, stretches = at_hand(selected.exchange, selected.segment, selected.sources, sizes)
        tile = largest_divisor(tokens, sizes.queries)
        # twice an even share, so that a query's rows usually come in one round
        capacity = min(k, sizes.keys, -(-2 * k // parties.count))
        return cls(selected, parties, stretches, tile, tokens // tile, capacity)

    def everyone(self, x: jax.Array, i: jax.Array) -> jax.Array:
        """Tile i of every party."""
        return self.parties.gather(lax.dynamic_slice_in_dim(x, i * self.tile, self.tile))

    def runs(self, i: jax.Array) -> list[_Run]:
        """For tile i of every party, what it selects of each stretch that this party keeps."""
        parties = self.parties.count
        rows, bounds = (self.parties.gather(x) for x in self._by_keeper(i))
        me = self.parties.index() if parties > 1 else 0
        place = [s * parties + me for s in range(len(self.stretches))]
        first, stop = ([lax.dynamic_index_in_dim(bounds, p + d, 1, keepdims=False) for p in place] for d in (0, 1))
        share = [min(-(-rows.shape[1] // parties), stretch.count) for stretch in self.stretches]
        return [_Run(*run) for run in zip(self.stretches, [rows] * len(place), first, stop, share, strict=True)]

    def _by_keeper(self, i: jax.Array) -> tuple[Int[Array, "t K"], Int[Array, "t bounds"]]:
        """Rows of the tile's selection by (stretch, keeper), and where each keeper's begin: [t, stretches * parties + 1]."""
        selection = lax.dynamic_slice_in_dim(self.selected.selection, i * self.tile, self.tile)
        positions = lax.dynamic_slice_in_dim(self.selected.segment.positions(), i * self.tile, self.tile)
        keepers = len(self.stretches) * self.parties.count
        keeper, rows = jnp.full(selection.shape, keepers, jnp.int32), jnp.zeros(selection.shape, jnp.int32)
        for s, stretch in enumerate(self.stretches):
            held, party, row = stretch.find(selection)
            held &= selection <= positions[:, None]
            keeper, rows = jnp.where(held, s * self.parties.count + party, keeper), jnp.where(held, row, rows)
        if self.parties.count > 1:  # a single party's are in order: positions ascend, and so do the stretches
            keeper, rows = lax.sort((keeper, rows), num_keys=2)
        bounds = (keeper[:, None, :] < jnp.arange(keepers + 1)[None, :, None]).sum(-1, dtype=jnp.int32)
        return rows, bounds

    def buffers(self, gradients: list[Array | None]) -> list[Array | None]:
        """Where the cotangents of the rows at hand are summed: in place, or for fetched rows in a buffer of their size."""
        if self.selected.exchange == "rounds":
            return list(gradients)
        return [None if gradient is None else jnp.zeros(stretch.rows.shape, gradient.dtype)
                for stretch, gradient in zip(self.stretches, gradients, strict=True)]

    def add_back(self, gradients: list[Array | None], buffers: list[Array | None]) -> list[Array | None]:
        """`gradients` with what `buffers` hold."""
        if self.selected.exchange == "rounds":
            return buffers
        sizes, last = self.selected.sizes, last_position(self.selected.segment)
        return [None if gradient is None else source.add_back(gradient, buffer, sizes.keys, last)
                for source, gradient, buffer in zip(self.selected.sources, gradients, buffers, strict=True)]


def _scores(q: jax.Array, rows: jax.Array, there: jax.Array, scale: float) -> jax.Array:
    """Scaled scores [Q, H, S] of each query's rows [Q, S, C], -inf where there is none."""
    x = jnp.einsum("qhc,qsc->qhs", q, rows, preferred_element_type=statistics_dtype(q.dtype)) * scale
    return jnp.where(there[:, None], x, -jnp.inf)


def _partial(
    q: Float[Array, "Q H C"], runs: list[_Run], selected: Selected, capacity: int
) -> tuple[Float[Array, "Q H V"], Float[Array, "Q H"]]:
    """Online softmax over the rows at hand: (normalised output, log-normaliser)."""
    wide = statistics_dtype(q.dtype)
    heads = q.shape[:2]
    carry = jnp.zeros((*heads, selected.value_width), wide), jnp.full(heads, -jnp.inf, wide), jnp.zeros(heads, wide)
    for run in runs:

        def one(r, carry, run=run):
            out, top, total = carry
            rows, there, _ = run.round(r, capacity)
            x = _scores(q, rows, there, selected.scale)
            higher = jnp.maximum(top, x.max(-1))
            base = jnp.where(jnp.isfinite(higher), higher, 0)  # a query that has no row yet
            p, shrink = jnp.exp(x - base[..., None]), jnp.exp(top - base)
            values = rows[..., : selected.value_width]
            part = jnp.einsum("qhs,qsv->qhv", p.astype(values.dtype), values, preferred_element_type=wide)
            return out * shrink[..., None] + part, higher, total * shrink + p.sum(-1)

        carry = lax.fori_loop(0, run.rounds(capacity), one, carry)
    out, top, total = carry
    some = total > 0
    total = jnp.where(some, total, 1)
    return out / total[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)


def _pull_partial(q, out_bar, lse, delta, runs, buffers, selected, capacity):
    """This party's part of the queries' cotangent, and its rows' cotangents added to `buffers`."""
    wide, width = statistics_dtype(q.dtype), selected.value_width
    base = jnp.where(jnp.isfinite(lse), lse, 0)  # of a query that selects nothing: exp(-inf - 0) is 0
    q_bar, grown = jnp.zeros(q.shape, wide), []
    for run, buffer in zip(runs, buffers, strict=True):

        def one(r, carry, run=run):
            q_bar, buffer = carry
            rows, there, at = run.round(r, capacity)
            p = jnp.exp(_scores(q, rows, there, selected.scale) - base[..., None])
            p_bar = jnp.einsum("qhv,qsv->qhs", out_bar, rows[..., :width], preferred_element_type=wide)
            x_bar = (p * (p_bar - delta[..., None]) * selected.scale).astype(q.dtype)
            q_bar = q_bar + jnp.einsum("qhs,qsc->qhc", x_bar, rows, preferred_element_type=wide)
            if buffer is not None:
                row_bar = jnp.einsum("qhs,qhc->qsc", x_bar, q, preferred_element_type=wide)
                value_bar = jnp.einsum("qhs,qhv->qsv", p.astype(q.dtype), out_bar, preferred_element_type=wide)
                row_bar = row_bar + jnp.pad(value_bar, ((0, 0), (0, 0), (0, q.shape[-1] - width)))
                buffer = run.stretch.add_at(buffer, at, row_bar)
            return q_bar, buffer

        q_bar, buffer = lax.fori_loop(0, run.rounds(capacity), one, (q_bar, buffer))
        grown.append(buffer)
    return q_bar, grown
