"""Placement of weights: which dimension of a tensor the owners share out.

A rank never holds the whole model: every weight matrix is split over all owners and gathered for the one layer that runs.
Experts go to the owners along one mesh axis, and the others split each expert's matrices.
Logical axes in the models, mesh axes here.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from longstraw_jax.errors import InputError
from longstraw_jax.sharding.owners import Owners

SPLIT = "split"
"""Logical axis that the owners may share out."""
EXPERT = "expert"
"""Logical axis of experts: owner i of those along the expert axis holds the i-th part of them."""
WHOLE = None
"""Logical axis that every owner holds whole."""


@dataclass(frozen=True)
class PlacementRules:
    """`expert`: the owners along the mesh axis that experts are dealt to; needed for tensors with an EXPERT axis only."""

    owners: Owners
    expert: Owners | None = None

    def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        """Splits the first axis marked SPLIT whose size the owners divide; a tensor without one is replicated.

        `axes` names the last len(axes) dimensions of `shape`; the leading ones (stacked layers) stay whole. A tensor with an
        EXPERT axis has it split over the expert owners, and SPLIT over the other owners. Raises InputError where the expert
        owners do not divide the number of experts.
        """
        parts = {}
        if EXPERT in axes:
            at = len(shape) - len(axes) + axes.index(EXPERT)
            if self.expert is None or shape[at] % self.expert.count:
                raise InputError(f"{shape[at]} experts on {self.expert and self.expert.count} expert owners; wanted a number of owners "
                                 "that divides them: choose the mesh's expert=N accordingly")
            parts[at] = self.expert.axes
        split = self.split_axis(shape, axes)
        if split is not None:
            parts[split] = self._sharing(axes).axes
        return PartitionSpec(*(parts.get(i) for i in range(max(parts, default=-1) + 1)))

    def split_axis(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> int | None:
        """The dimension marked SPLIT that `spec` splits, or None."""
        lead, count = len(shape) - len(axes), self._sharing(axes).count
        return next((lead + i for i, axis in enumerate(axes) if axis == SPLIT and shape[lead + i] % count == 0), None)

    def _sharing(self, axes: tuple[str | None, ...]) -> Owners:
        """The owners that share a SPLIT dimension out."""
        if EXPERT not in axes or self.expert is None:
            return self.owners
        others = tuple(axis for axis in self.owners.axes if axis not in self.expert.axes)
        return Owners(others, self.owners.count // self.expert.count)
