"""Where a token lives: granules of consecutive positions, dealt to the owners in turn.

With granules of one page this is the prompt's page-cyclic layout, owner(page) = page mod owners; with granules of
block / owners tokens it is the response's, every block split evenly and contiguously. One formula serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from longstraw_jax.sharding.owners import Owners


@dataclass(frozen=True)
class Layout:
    """Slot i of owner o holds offset ((i // granule) * owners + o) * granule + i % granule from the first position."""

    owners: Owners
    granule: int

    def offsets(self, slots: ArrayLike, owner: ArrayLike) -> jax.Array:
        """Offsets of `slots` (any shape, broadcast against `owner`)."""
        slots = jnp.asarray(slots)
        return ((slots // self.granule) * self.owners.count + owner) * self.granule + slots % self.granule

    def locate(self, offsets: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """The inverse of `offsets`: (owner, slot) of non-negative offsets of any shape."""
        offsets = jnp.asarray(offsets)
        number = offsets // self.granule
        return number % self.owners.count, (number // self.owners.count) * self.granule + offsets % self.granule

    def slots_covering(self, tokens: ArrayLike) -> ArrayLike:
        """How many slots of the fullest owner the first `tokens` offsets occupy, rounded up to whole granules."""
        return -(-tokens // (self.granule * self.owners.count)) * self.granule

    def slots_within(self, tokens: ArrayLike) -> ArrayLike:
        """How many slots of every owner hold nothing but the first `tokens` offsets, rounded down to whole granules."""
        return tokens // (self.granule * self.owners.count) * self.granule

    def to_sequence(self, x: jax.Array) -> jax.Array:
        """[owners, slots, ...], one row an owner -> [owners * slots, ...] in the order of the sequence."""
        n, slots = x.shape[:2]
        x = x.reshape(n, slots // self.granule, self.granule, *x.shape[2:])
        return x.swapaxes(0, 1).reshape(n * slots, *x.shape[3:])

    def from_sequence(self, x: jax.Array) -> jax.Array:
        """The inverse: [owners * slots, ...] -> [owners, slots, ...]."""
        n = self.owners.count
        x = x.reshape(x.shape[0] // (n * self.granule), n, self.granule, *x.shape[1:])
        return x.swapaxes(0, 1).reshape(n, x.shape[0] * self.granule, *x.shape[3:])
