"""The token owners as one flat axis, seen from inside `shard_map`: every collective of the project is written here.

All tokens, pages, heads and weight shards are spread over context x expert devices; which of the two mesh axes carries them
makes no difference to these functions. Source of the exchange pattern: DESIGN "Attention over pages" and "Recurrence".
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec


@dataclass(frozen=True)
class Owners:
    """`count` devices along the mesh axes `axes`, numbered row-major. Hashable, so that it can be a static argument."""

    axes: tuple[str, ...]
    count: int

    @classmethod
    def of(cls, mesh: Mesh) -> Owners:
        return cls(tuple(mesh.axis_names), mesh.size)

    @property
    def spec(self) -> PartitionSpec:
        """Shards the first dimension over all owners."""
        return PartitionSpec(self.axes)

    def index(self) -> jax.Array:
        return lax.axis_index(self.axes)

    def gather(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """[.., n, ..] of each owner -> [.., count * n, ..] on all, in the owners' order. Its transpose sums and scatters."""
        return x if self.count == 1 else lax.all_gather(x, self.axes, axis=axis, tiled=True)

    def scatter_sum(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """[.., count * n, ..] of each owner -> the owner's part [.., n, ..] of the sum over owners."""
        return x if self.count == 1 else lax.psum_scatter(x, self.axes, scatter_dimension=axis, tiled=True)

    def exchange(self, x: jax.Array) -> jax.Array:
        """[count, ...]: row i of owner j becomes row j of owner i.

        Split and concatenated on the same axis only: with two different ones all_to_all has a wrong transpose (jax 0.10.2).
        """
        return x if self.count == 1 else lax.all_to_all(x, self.axes, 0, 0, tiled=True)

    def sum(self, x):
        return x if self.count == 1 else lax.psum(x, self.axes)

    def max(self, x: jax.Array) -> jax.Array:
        return x if self.count == 1 else lax.pmax(x, self.axes)
