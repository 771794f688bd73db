"""Placement of weights: which dimension of a tensor the owners share out.

A rank never holds the whole model: every weight matrix is split over all owners and gathered for the one layer that runs.
Logical axes in the models, mesh axes here.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from longstraw_jax.sharding.owners import Owners

SPLIT = "split"
"""Logical axis that the owners may share out."""
WHOLE = None
"""Logical axis that every owner holds whole."""


@dataclass(frozen=True)
class PlacementRules:
    owners: Owners

    def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        """Splits the first axis marked SPLIT whose size the owners divide; a tensor without one is replicated.

        `axes` names the last len(axes) dimensions of `shape`; the leading ones (stacked layers) stay whole.
        """
        lead = len(shape) - len(axes)
        for i, axis in enumerate(axes):
            if axis == SPLIT and shape[lead + i] % self.owners.count == 0:
                return PartitionSpec(*[None] * (lead + i), self.owners.axes)
        return PartitionSpec()

    def split_axis(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> int | None:
        """The dimension that `spec` splits, or None."""
        spec = self.spec(shape, axes)
        return len(spec) - 1 if len(spec) else None
