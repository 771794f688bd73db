"""From counted work to seconds: a chip's rates, the share of them that is assumed to be reached, and nothing measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from longstraw_jax.deviceless import Chip

RINGS = ("all_gather", "reduce_scatter", "psum", "pmax")
"""Collectives that go round, so that all adapters of a node carry the node's traffic together."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a chip's rates that are assumed to be reached."""

    compute: float = 0.5
    memory: float = 0.8
    link: float = 0.8


@dataclass(frozen=True)
class Estimate:
    """Seconds of one stage by what bounds them. Compute and memory overlap, exchanges and the host's link do not."""

    compute: float
    memory: float
    links: float
    host: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory) + self.links + self.host

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(vars(self), key=lambda name: getattr(self, name))


def estimate(
    flops: float, memory_bytes: float, exchanged: Mapping[tuple[str, tuple[str, ...]], float], host_bytes: float, chip: Chip,
    mesh: Mapping[str, int], efficiency: Efficiency,
) -> Estimate:
    """Args are of one device: operations, bytes of its memory read and written, bytes exchanged by (collective, mesh axes), bytes
    over the host's link."""
    links = sum(size / (rate(kind, axes, chip, mesh) * efficiency.link) for (kind, axes), size in exchanged.items())
    return Estimate(flops / (chip.flops * efficiency.compute), memory_bytes / (chip.bandwidth * efficiency.memory), links,
                    host_bytes / (chip.host_link * efficiency.link))


def rate(kind: str, axes: Sequence[str], chip: Chip, mesh: Mapping[str, int]) -> float:
    """Bytes a second of one device in a collective along `axes` of a mesh whose devices fill one node after the other."""
    nodes, peers = _nodes(axes, chip, mesh)
    if nodes == 1:
        return chip.link
    if kind in RINGS:
        return min(chip.link, chip.network * min(chip.node, peers // nodes))
    remote = (peers - peers // nodes) / max(1, peers - 1)
    return 1 / (remote / chip.network + (1 - remote) / chip.link)


def _nodes(axes: Sequence[str], chip: Chip, mesh: Mapping[str, int]) -> tuple[int, int]:
    """(nodes that a group of devices along `axes` spans, devices of the group)."""
    grid = np.arange(int(np.prod(list(mesh.values())))).reshape(tuple(mesh.values()))
    group = grid[tuple(slice(None) if axis in axes else 0 for axis in mesh)].reshape(-1)
    return len(set((group // chip.node).tolist())), len(group)
