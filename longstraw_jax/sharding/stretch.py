"""Rows of a stretch of one sequence, as one owner sees them: its own slots, or all owners' after `fetch`.

What attends to single positions asks a stretch two things: which position a row holds, and where a position's row is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax.sharding.layout import Layout

NO_POSITION = np.int32(np.iinfo(np.int32).max)
"""Stands where a list of positions has no entry; sorts behind every position."""


@dataclass(frozen=True)
class Stretch:
    """Rows of all layers of one stretch, and which layer is meant.

    The whole stack is closed over and indexed by (layer, row) in the innermost read; a slice of one layer taken outside would
    be copied.
    """

    rows: Float[Array, "L S *rest"]
    layer: Int[Array, ""]
    start: Int[Array, ""]
    """Position of the stretch's first token."""
    length: Int[Array, ""]
    """Tokens that are real, over all owners."""
    layout: Layout
    dealt: int | None = None
    """None: a row is the owner's slot. Otherwise the rows are all owners' (`fetch`), so many slots of each owner in turn."""
    alone: bool = False
    """Whether `rows` [1, S, ...] are a copy of the layer alone, not of all layers."""

    @property
    def place(self) -> Int[Array, ""]:
        """Of the layer in `rows`; `layer` is its place in buffers of all layers."""
        return jnp.int32(0) if self.alone else self.layer

    @property
    def count(self) -> int:
        """Rows at hand, real or not."""
        return self.rows.shape[1]

    def positions(self, first: jax.Array, count: int) -> Int[Array, "count"]:
        """Positions of `count` rows from row `first` on; NO_POSITION where a row holds no token."""
        rows = jnp.asarray(first, jnp.int32) + jnp.arange(count, dtype=jnp.int32)
        owner, slots = (self.layout.owners.index(), rows) if self.dealt is None else self._fetched().locate(rows)
        offsets = self.layout.offsets(slots, owner)
        return jnp.where(offsets < self.length, self.start + offsets, NO_POSITION).astype(jnp.int32)

    def find(self, positions: Int[Array, "*shape"]) -> tuple[Bool[Array, "*shape"], Int[Array, "*shape"], Int[Array, "*shape"]]:
        """(whether the stretch holds the position, which party keeps it, its row there).

        Parties are the owners; of fetched rows, which every owner has, the one party 0.
        """
        offsets = positions - self.start
        held = (offsets >= 0) & (offsets < self.length)
        owner, slot = self.layout.locate(jnp.where(held, offsets, 0))
        if self.dealt is not None:
            owner, slot = jnp.zeros_like(owner), self._fetched().offsets(slot, owner)
        return held, owner.astype(jnp.int32), slot.astype(jnp.int32)

    def covering(self, last: jax.Array) -> jax.Array:
        """How many rows, from the first on, hold whatever a query at position `last` can see."""
        slots = self.layout.slots_covering(jnp.clip(jnp.minimum(self.length, last + 1 - self.start), 0))
        return slots if self.dealt is None else -(-slots // self.dealt) * self.dealt * self.layout.owners.count

    def read(self, first: jax.Array, count: int) -> Float[Array, "count *rest"]:
        """`count` rows from row `first` on."""
        return lax.dynamic_slice(self.rows, self._at(first, self.place), (1, count, *self.rows.shape[2:]))[0]

    def take(self, at: Int[Array, "*shape"]) -> Float[Array, "..."]:
        """Rows at `at`, any shape; zeros where `at` is beyond the last row."""
        return self.rows.at[self.place, at].get(mode="fill", fill_value=0)

    def add_at(self, buffer: Float[Array, "L S *rest"], at: Int[Array, "*shape"], x: Float[Array, "..."]) -> jax.Array:
        """`buffer`, of the rows' shape, with `x` added to the rows at `at`, in place inside a loop; none beyond the last row.

        The barrier keeps the layout of the product that made `x` from spreading to the whole buffer.
        """
        return buffer.at[self.layer, at].add(lax.optimization_barrier(x).astype(buffer.dtype), mode="drop")

    def fetch(self, block: int, last: jax.Array) -> Stretch:
        """The layer's rows of all owners, on every owner: gathered by `block` slots, as far as position `last` can see."""
        dealt, steps = self._steps(block, last)
        owners = self.layout.owners

        def one(j, rows):
            part = owners.gather(self.read(j * dealt, dealt))
            return lax.dynamic_update_slice(rows, part[None], self._at(j * dealt * owners.count, layer=0))

        rows = lax.fori_loop(0, steps, one, jnp.zeros((1, owners.count * self.count, *self.rows.shape[2:]), self.rows.dtype))
        return dataclasses.replace(self, rows=rows, layer=jnp.int32(0), dealt=dealt, alone=True)

    def add_back(self, buffer: jax.Array, fetched: jax.Array, block: int, last: jax.Array) -> jax.Array:
        """The transpose of `fetch`: `buffer`, of the rows' shape, with every owner's `fetched` added, each row at its owner."""
        dealt, steps = self._steps(block, last)
        owners, rest = self.layout.owners, self.rows.shape[2:]

        def one(j, buffer):
            part = lax.dynamic_slice(fetched, self._at(j * dealt * owners.count, layer=0), (1, dealt * owners.count, *rest))
            mine = owners.scatter_sum(part[0])[None].astype(buffer.dtype)
            old = lax.dynamic_slice(buffer, self._at(j * dealt), mine.shape)
            return lax.dynamic_update_slice(buffer, old + mine, self._at(j * dealt))

        return lax.fori_loop(0, steps, one, buffer)

    def _fetched(self) -> Layout:
        """Fetched rows lie by blocks of slots, and inside a block by owners: as offsets of a layout with that granule."""
        return Layout(self.layout.owners, self.dealt)

    def _steps(self, block: int, last: jax.Array) -> tuple[int, jax.Array]:
        """Slots gathered at a time, a divisor of all slots, and how many times; the same on every owner."""
        dealt = next(d for d in range(min(self.count, block), 0, -1) if self.count % d == 0)
        return dealt, -(-self.covering(last) // dealt)

    def _at(self, first: jax.Array, layer: jax.Array | int | None = None) -> tuple[jax.Array, ...]:
        """A start index, of one type, as the slicing primitives ask."""
        index = (self.layer if layer is None else layer, first, *[0] * (self.rows.ndim - 2))
        return tuple(jnp.asarray(i, jnp.int32) for i in index)
