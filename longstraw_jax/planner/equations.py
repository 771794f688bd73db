"""What one equation of a jaxpr costs a device, from its shapes alone; what it holds inside is `planner.cost`'s to count.

Elementwise work, reductions, reshapes and transposes count nothing: XLA fuses them into what reads or writes their operands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
from jax.extend.core import JaxprEqn

Traffic = Mapping[tuple[str, tuple[str, ...]], float]
"""Bytes by the kind of collective and the mesh axes that it goes over."""


@dataclass(frozen=True)
class Cost:
    """Of one device. `+` joins, `*` repeats."""

    flops: float = 0.0
    """Of matrix products, convolutions and triangular solves; a product of [M, K] and [K, N] has 2 M N K."""
    memory_bytes: float = 0.0
    """To and from the device's memory: operands and results of products and sorts, and of gathers, scatters and slices the part that
    is meant, not the buffer that it lies in."""
    communication: Traffic = field(default_factory=dict)
    """Bytes that the device receives: {("all_gather", ("context", "expert")): 1e9}. ("device_put", ()) is between host and device."""
    unknown_loops: frozenset[str] = frozenset()
    """Where in the source the loops stand whose trips could not be told; they are counted as one trip."""

    def __add__(self, other: Cost) -> Cost:
        keys = {**self.communication, **other.communication}
        traffic = {key: self.communication.get(key, 0.0) + other.communication.get(key, 0.0) for key in keys}
        return Cost(self.flops + other.flops, self.memory_bytes + other.memory_bytes, traffic, self.unknown_loops | other.unknown_loops)

    def __mul__(self, times: float) -> Cost:
        traffic = {key: times * x for key, x in self.communication.items()}
        return dataclasses.replace(self, flops=times * self.flops, memory_bytes=times * self.memory_bytes, communication=traffic)

    __rmul__ = __mul__

    @property
    def communication_bytes(self) -> float:
        """Between devices, all kinds and axes together."""
        return sum(self.exchanged.values())

    @property
    def exchanged(self) -> Traffic:
        """What goes between devices."""
        return {key: x for key, x in self.communication.items() if key[0] != "device_put"}

    @property
    def host_bytes(self) -> float:
        """Between the device and its host's memory."""
        return self.communication.get(("device_put", ()), 0.0)


NOTHING = Cost()


def equation_cost(eqn: JaxprEqn, sizes: Mapping[str, int]) -> Cost:
    """Of one run of an equation; `sizes` are the mesh axes'."""
    name = eqn.primitive.name
    if name in _PRODUCTS:
        return Cost(_PRODUCTS[name](eqn), sum(map(_bytes, (*eqn.invars, *eqn.outvars))))
    if name in _TRAFFIC:
        return Cost(memory_bytes=_TRAFFIC[name](eqn))
    if name in _COLLECTIVES:
        axes = _axes(eqn)
        count = math.prod(sizes[axis] for axis in axes)
        return Cost(communication={(name, axes): _COLLECTIVES[name](eqn) * (count - 1) / count}) if count > 1 else NOTHING
    if name == "ppermute":
        return Cost(communication={(name, _axes(eqn)): _in(eqn)})
    if name == "device_put" and any(isinstance(place, jax.memory.Space) for place in eqn.params["devices"]):
        return Cost(communication={(name, ()): _in(eqn)})
    return NOTHING


def _bytes(atom) -> float:
    return float(math.prod(atom.aval.shape) * atom.aval.dtype.itemsize)


def _in(eqn: JaxprEqn) -> float:
    return sum(map(_bytes, eqn.invars))


def _out(eqn: JaxprEqn) -> float:
    return sum(map(_bytes, eqn.outvars))


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def _dot_flops(eqn: JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _convolution_flops(eqn: JaxprEqn) -> float:
    kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / kernel[numbers.rhs_spec[0]]


def _solve_flops(eqn: JaxprEqn) -> float:
    """Half of a product with the whole matrix: the other half of it is zeros."""
    return float(math.prod(eqn.outvars[0].aval.shape) * eqn.invars[0].aval.shape[-1])


_PRODUCTS: dict[str, Callable[[JaxprEqn], float]] = {
    "dot_general": _dot_flops, "conv_general_dilated": _convolution_flops, "triangular_solve": _solve_flops,
}

_TRAFFIC: dict[str, Callable[[JaxprEqn], float]] = {
    # read and written
    "gather": lambda eqn: 2 * _out(eqn) + _bytes(eqn.invars[1]),
    "dynamic_slice": lambda eqn: 2 * _out(eqn),
    "dynamic_update_slice": lambda eqn: 2 * _bytes(eqn.invars[1]),
    "scatter": lambda eqn: 2 * _bytes(eqn.invars[2]) + _bytes(eqn.invars[1]),
    # the old value is read, too
    "scatter-add": lambda eqn: 3 * _bytes(eqn.invars[2]) + _bytes(eqn.invars[1]),
    "sort": lambda eqn: _in(eqn) + _out(eqn),
    "top_k": lambda eqn: _in(eqn) + _out(eqn),
}

_COLLECTIVES: dict[str, Callable[[JaxprEqn], float]] = {
    # bytes of which all but one's own part, (n - 1) / n of them, are received
    "all_gather": _out,
    "reduce_scatter": _in,
    "all_to_all": _in,
    # at most: rows that stay at home and room that is not filled count, too
    "ragged_all_to_all": lambda eqn: _bytes(eqn.invars[0]),
    # a ring's scattered sums, and their gathering
    "psum": lambda eqn: 2 * _in(eqn),
    "pmax": lambda eqn: 2 * _in(eqn),
    "pmin": lambda eqn: 2 * _in(eqn),
}
