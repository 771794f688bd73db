"""The token owners as one flat axis, seen from inside `shard_map`: every collective of the project is written here.

All tokens, pages, heads and weight shards are spread over context x expert devices; which of the two mesh axes carries them
makes no difference to these functions. Source of the exchange pattern: DESIGN "Attention over pages" and "Recurrence".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec


@dataclass(frozen=True)
class Owners:
    """`count` devices along the mesh axes `axes`, numbered row-major. Hashable, so that it can be a static argument."""

    axes: tuple[str, ...]
    count: int

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, *axes: str) -> Owners:
        """The owners along some axes of a mesh; along all of them where none is named."""
        axes = axes or tuple(mesh.axis_names)
        return cls(axes, math.prod(mesh.shape[axis] for axis in axes))

    @property
    def spec(self) -> PartitionSpec:
        """Shards the first dimension over all owners."""
        return PartitionSpec(self.axes)

    def copies(self, spec: PartitionSpec) -> Owners:
        """Those that hold copies of one shard of an array placed by `spec`: along the axes it does not name. In `shard_map` only."""
        named = {axis for part in spec if part is not None for axis in ([part] if isinstance(part, str) else part)}
        axes = tuple(axis for axis in self.axes if axis not in named)
        return Owners(axes, math.prod(lax.axis_size(axis) for axis in axes))

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

    def ragged_exchange(
        self, rows: jax.Array, room: jax.Array, starts: jax.Array, sizes: jax.Array, places: jax.Array, received: jax.Array
    ) -> jax.Array:
        """Sends `sizes[j]` rows from `starts[j]` on to owner j, who finds them from `places[j]` on in its `room`.

        All four are int32 [count]; `received[j]` rows come from owner j. XLA has it for GPUs and TPUs, not for CPUs.
        """
        return lax.ragged_all_to_all(rows, room, starts, sizes, places, received, axis_name=self.axes)

    def sum(self, x):
        return x if self.count == 1 else lax.psum(x, self.axes)

    def max(self, x: jax.Array) -> jax.Array:
        return x if self.count == 1 else lax.pmax(x, self.axes)


def gather_whole(weight: jax.Array, shape: tuple[int, ...], owners: Owners) -> jax.Array:
    """Gathers the dimension in which `weight` is a shard of `shape`; a replicated weight comes back as it is.

    Under differentiation the gather's transpose sums the owners' cotangents and leaves each its shard.
    """
    for axis, size in enumerate(shape):
        if weight.shape[axis] != size:
            return owners.gather(weight, axis)
    return weight
