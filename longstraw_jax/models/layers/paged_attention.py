"""Causal grouped-query attention of a segment over pages that are spread over the owners; forward and backward written out.

Every owner attends with the queries of all owners to its own rows (online softmax over blocks of rows, statistics in fp32,
never a [queries, rows] matrix); rows that all of the queries see go to a GPU library's kernel where there is one. An exchange
brings each token's partials to its owner and `lse_merge` joins them. The backward pass forms probabilities from the merged
log-normaliser, so no cotangent of the partials' is needed (FlashAttention-2, Dao 2023, algorithm 2), and adds the rows'
cotangents in place into one buffer: `jax.vjp` would return page-sized copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from longstraw_jax.config import BlockSizes
from longstraw_jax.kernels_pallas import dense_attention, dense_choice, lse_merge
from longstraw_jax.models.base import NewRows, Pages, Segment
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.stacked import read, write
from longstraw_jax.models.layers.vocabulary import largest_divisor
from longstraw_jax.sharding import Layout, Owners

_TOGETHER = 16
"""Blocks that a library's kernel attends to in one call: enough work to start it for, and their copies are small."""


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of all attention layers of one stretch, and which layer is meant.

    The whole stack is closed over and indexed by (layer, block) in the innermost loop; a slice of one layer taken outside
    would be copied, which at two million tokens is a gigabyte.
    """

    k: Float[Array, "L S KV D"]
    v: Float[Array, "L S KV D"]
    layer: Int[Array, ""]
    start: Int[Array, ""]
    length: Int[Array, ""]
    layout: Layout
    block: int
    alone: bool = False
    """Whether k and v are copies of the layer alone, not of all layers."""

    @classmethod
    def of(cls, pages: Pages, layer: jax.Array, owners: Owners, keys: int, new: NewRows | None = None) -> KeyValues:
        k, v = (pages.layer(name, layer, new) for name in ("k", "v"))
        block = largest_divisor(k.shape[1], keys)
        return cls(k, v, layer, pages.start, pages.length, Layout(owners, pages.granule), block, pages.host)

    def blocks(self, last: Int[Array, ""]) -> Int[Array, ""]:
        """Row blocks that a query at position `last` or before can see."""
        tokens = jnp.clip(jnp.minimum(self.length, last + 1 - self.start), 0)
        return -(-self.layout.slots_covering(tokens) // self.block)

    def joined(self, count: int) -> KeyValues:
        """The same rows in larger blocks, of up to `count` of these."""
        return replace(self, block=self.block * largest_divisor(self.k.shape[1] // self.block, count))

    def whole_blocks(self, first: Int[Array, ""]) -> Int[Array, ""]:
        """Row blocks, from the first on, that a query at position `first` or later sees whole."""
        tokens = jnp.clip(jnp.minimum(self.length, first + 1 - self.start), 0)
        return self.layout.slots_within(tokens) // self.block

    def keys(self, j: jax.Array) -> jax.Array:
        return self._read(self.k, self._place, j)

    def values(self, j: jax.Array) -> jax.Array:
        return self._read(self.v, self._place, j)

    @property
    def _place(self) -> jax.Array | int:
        """Of the layer in k and v; `layer` is its place in buffers of all layers."""
        return 0 if self.alone else self.layer

    def _read(self, rows: jax.Array, layer: jax.Array | int, j: jax.Array) -> jax.Array:
        return read(rows, (layer, j * self.block), (1, self.block, *rows.shape[2:]))[0]

    def add(self, rows: jax.Array, j: jax.Array, x: jax.Array) -> jax.Array:
        """`rows` with `x` added to block j, in place inside a loop.

        The barrier keeps the layout of the product that made `x` from spreading to the whole buffer, which XLA would then
        transpose on the way in and out.
        """
        x = self._read(rows, self.layer, j) + lax.optimization_barrier(x).astype(rows.dtype)
        return write(rows, x[None], (self.layer, j * self.block))

    def scores(self, q: Float[Array, "KV G Q D"], positions: Int[Array, "Q"], j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scaled scores [KV, G, Q, block] of block j, -inf where the row is padding or in the future, and the block's keys."""
        k = self.keys(j)
        offsets = self.layout.offsets(j * self.block + jnp.arange(self.block), self.layout.owners.index())
        x = jnp.einsum("kgqd,skd->kgqs", q, k, preferred_element_type=statistics_dtype(q.dtype)) * q.shape[-1] ** -0.5
        visible = (offsets[None] < self.length) & (self.start + offsets[None] <= positions[:, None])
        return jnp.where(visible, x, -jnp.inf), k


def attend(
    q: Float[Array, "T H D"], segment: Segment, sources: list[KeyValues], sizes: BlockSizes
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Attention of the owner's queries over all owners' rows of all `sources`: (output in q's dtype, log-normaliser)."""
    tile = largest_divisor(q.shape[0], sizes.queries)
    owners, groups = segment.owners, _Groups.of(q, sources)
    positions = segment.all_positions()

    def one(i):
        here = lax.dynamic_slice_in_dim(positions, i * tile, tile, 1).reshape(-1)
        everyone = owners.gather(lax.dynamic_slice_in_dim(q, i * tile, tile))
        out, lse = _partial(everyone, here, sources, groups)
        out = owners.exchange(groups.join(out).reshape(owners.count, tile, *q.shape[1:]))
        lse = owners.exchange(groups.join_rows(lse).reshape(owners.count, tile, q.shape[1]))
        out, lse = lse_merge(out, lse)
        return out.astype(q.dtype), lse

    out, lse = lax.map(one, jnp.arange(q.shape[0] // tile))
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _partial(everyone, positions, sources, groups):
    """Of queries [Q, H, D] over this owner's rows: (normalised output [KV, G, Q, D], log-normaliser [KV, G, Q])."""
    q = groups.split(everyone)
    online = _Online.none(q)
    for source in sources:

        def block(j, online, source=source):
            return online.scored(source.scores(q, positions, j)[0], source.values(j))

        online, done = _whole_blocks(online, everyone, positions, source, groups)
        online = lax.fori_loop(done, source.blocks(positions.max()), block, online)
    return online.normalised()


def _whole_blocks(online, everyone, positions, source, groups):
    """(`online` with the blocks that every query sees whole, how many they are); none of them where XLA attends."""
    if dense_choice(everyone, groups.kv) == "xla":
        return online, 0
    joined = source.joined(_TOGETHER)

    def block(j, online):
        out, lse = dense_attention(everyone, joined.keys(j), joined.values(j))
        return online.merged(groups.split(out), groups.split_rows(lse))

    count = joined.whole_blocks(positions.min())
    return lax.fori_loop(0, count, block, online), count * (joined.block // source.block)


class _Online(NamedTuple):
    """The softmax over the rows so far (Milakov and Gimelshein, 2018): sums of exponentials of the scores less `top`."""

    out: jax.Array
    """[KV, G, Q, D], not normalised."""
    top: jax.Array
    total: jax.Array

    @classmethod
    def none(cls, q: jax.Array) -> _Online:
        """Of q [KV, G, Q, D], over no rows."""
        wide = statistics_dtype(q.dtype)
        return cls(jnp.zeros(q.shape, wide), jnp.full(q.shape[:3], -jnp.inf, wide), jnp.zeros(q.shape[:3], wide))

    def scored(self, scores: jax.Array, v: jax.Array) -> _Online:
        """With rows of these scores [KV, G, Q, rows] and values [rows, KV, D]."""
        higher, base, shrink = self._raised(scores.max(-1))
        p = jnp.exp(scores - base[..., None])
        more = jnp.einsum("kgqs,skd->kgqd", p.astype(v.dtype), v, preferred_element_type=self.out.dtype)
        return _Online(self.out * shrink[..., None] + more, higher, self.total * shrink + p.sum(-1))

    def merged(self, out: jax.Array, lse: jax.Array) -> _Online:
        """With rows whose normalised output [KV, G, Q, D] and log-normaliser are known."""
        higher, base, shrink = self._raised(lse)
        p = jnp.exp(lse - base)
        return _Online(self.out * shrink[..., None] + out * p[..., None], higher, self.total * shrink + p)

    def normalised(self) -> tuple[jax.Array, jax.Array]:
        """(output, log-normaliser); 0 and -inf of a query that saw no row."""
        some = self.total > 0
        total = jnp.where(some, self.total, 1)
        return self.out / total[..., None], jnp.where(some, self.top + jnp.log(total), -jnp.inf)

    def _raised(self, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(the higher maximum, what to take off scores, the factor of the sums so far)."""
        higher = jnp.maximum(self.top, top)
        base = jnp.where(jnp.isfinite(higher), higher, 0)  # a row that has seen no key yet
        return higher, base, jnp.exp(self.top - base)


def pull_attend(
    q: Float[Array, "T H D"], out: Float[Array, "T H D"], lse: Float[Array, "T H"], cotangent: Float[Array, "T H D"],
    segment: Segment, sources: list[KeyValues], gradients: list[tuple[Array, Array] | None], sizes: BlockSizes,
) -> tuple[Float[Array, "T H D"], list[tuple[Array, Array] | None]]:
    """The transpose of `attend`: (cotangent of q, `gradients` with the cotangents of each source's k and v added).

    `gradients` are buffers [L, S, KV, D] in the statistics dtype, or None for a source that takes none.
    """
    tile = largest_divisor(q.shape[0], sizes.queries)
    owners, groups = segment.owners, _Groups.of(q, sources)
    positions = segment.all_positions()
    delta = (out.astype(lse.dtype) * cotangent.astype(lse.dtype)).sum(-1)

    def one(i, carry):
        q_bar, gradients = carry
        everyone = [owners.gather(lax.dynamic_slice_in_dim(x, i * tile, tile)) for x in (q, cotangent, lse, delta)]
        split = [groups.split(x) for x in everyone[:2]] + [groups.split_rows(x) for x in everyone[2:]]
        here = lax.dynamic_slice_in_dim(positions, i * tile, tile, 1).reshape(-1)
        part, gradients = _pull_partial(*split, here, sources, gradients)
        mine = owners.scatter_sum(groups.join(part)).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(q_bar, mine, i * tile, 0), gradients

    return lax.fori_loop(0, q.shape[0] // tile, one, (jnp.zeros_like(q), list(gradients)))


def _pull_partial(q, out_bar, lse, delta, positions, sources, gradients):
    """This owner's part of the queries' cotangent, and its rows' cotangents added to `gradients`."""
    wide = statistics_dtype(q.dtype)
    q_bar, grown = jnp.zeros(q.shape, wide), []
    last = positions.max()
    for source, gradient in zip(sources, gradients, strict=True):

        def block(j, carry, source=source):
            q_bar, gradient = carry
            x, k = source.scores(q, positions, j)
            p = jnp.exp(x - lse[..., None])
            p_bar = jnp.einsum("kgqd,skd->kgqs", out_bar, source.values(j), preferred_element_type=wide)
            x_bar = (p * (p_bar - delta[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
            q_bar = q_bar + jnp.einsum("kgqs,skd->kgqd", x_bar, k, preferred_element_type=wide)
            if gradient is not None:
                k_bar = jnp.einsum("kgqs,kgqd->skd", x_bar, q, preferred_element_type=wide)
                v_bar = jnp.einsum("kgqs,kgqd->skd", p.astype(q.dtype), out_bar, preferred_element_type=wide)
                gradient = source.add(gradient[0], j, k_bar), source.add(gradient[1], j, v_bar)
            return q_bar, gradient

        q_bar, gradient = lax.fori_loop(0, source.blocks(last), block, (q_bar, gradient))
        grown.append(gradient)
    return q_bar, grown


@dataclass(frozen=True)
class _Groups:
    """Between [tokens, heads, D] and [key-value heads, queries per key-value head, tokens, D]."""

    kv: int
    group: int

    @classmethod
    def of(cls, q, sources) -> _Groups:
        kv = sources[0].k.shape[2]
        return cls(kv, q.shape[1] // kv)

    def split(self, x):
        return x.reshape(x.shape[0], self.kv, self.group, -1).transpose(1, 2, 0, 3)

    def split_rows(self, x):
        return x.reshape(x.shape[0], self.kv, self.group).transpose(1, 2, 0)

    def join(self, x):
        return x.transpose(2, 0, 1, 3).reshape(x.shape[2], self.kv * self.group, -1)

    def join_rows(self, x):
        return x.transpose(2, 0, 1).reshape(x.shape[2], self.kv * self.group)
