"""What a stage's program costs each device, counted from its jaxpr: loops by their trips, branches by what decides them.

An abstract interpreter. A value is known (whole numbers and truth values of moderate size), expected (a guess beside a number that
only the data knows) or unknown; only what decides about loops and branches is followed (`planner.slices`). So a body that does
not look at its loop's counter is counted once, whatever the trips, and jaxprs inside are counted once for the same known inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from longstraw_jax.models.layers.expected import guess_in
from longstraw_jax.planner.equations import NOTHING, equation_cost
from longstraw_jax.planner.equations import Cost as Cost
from longstraw_jax.planner.slices import Loop, Mask, Slices, branches, called, holds_others, opened

Value = np.ndarray | float | None
"""Known, expected, unknown."""

_LARGEST = 1 << 20
"""Entries of a known value, at most: a chunk's positions are among them."""
_SAMPLES = 64
"""Iterations, at most, that are gone through one by one. Of more, so many are counted: evenly spaced and mirrored about the middle, so
that what grows linearly comes out exact."""
_PROBES = 3
"""Iterations that a carried number must grow by the same step to be taken for linear."""
_STILL = np.zeros((), np.int64)


def count(
    jaxpr: ClosedJaxpr, known: Sequence[np.ndarray | int | bool | None] | None = None, owner: Mapping[str, int] | None = None
) -> Cost:
    """Cost per device of a program, `jitted.trace(*args).jaxpr`.

    Args:
      jaxpr: of a stage; what stands inside `shard_map` has one device's shapes.
      known: for each flat argument its value, where it is a whole number or an array of such that decides about loops (`start`,
        `length`, `captured`, `members.length`, `backward`), else None. Default: nothing is known.
      owner: whose cost, by mesh axis. Default: the last one's, who has the latest positions and so the most to do. What owners
        gather of known numbers is taken to be that owner's throughout.

    Capture's and sweep's chunks cost what is linear in `start`, but for the rounding to blocks of keys: the cost at the middle chunk,
    times the chunks, is the prompt's.
    """
    values = [None] * len(jaxpr.in_avals) if known is None else [None if x is None else np.asarray(x) for x in known]
    values = [_held(x, aval.dtype) for x, aval in zip(values, jaxpr.in_avals, strict=True)]
    outs = len(jaxpr.out_avals)
    return _Counter(dict(owner or {})).run(jaxpr, values, (True,) * outs, (False,) * outs)[0]


@dataclass
class _Counter:
    owner: Mapping[str, int]
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the mesh axes inside `shard_map`."""
    slices: Slices = field(default_factory=Slices)
    done: dict = field(default_factory=dict)
    """By what `run` is given."""
    parts: dict = field(default_factory=dict)
    """By what `_parts` is given."""

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[Value], live: Mask, wanted: Mask) -> tuple[Cost, list[Value]]:
        """(cost of what the `live` outputs need, values of the `wanted` ones)."""
        ins = self.slices.of(jaxpr, wanted, True).ins
        args = [x if needed else None for x, needed in zip(args, ins, strict=True)]
        key = opened(jaxpr), live, wanted, tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in args)
        if key not in self.done:
            self.done[key] = self._run(jaxpr, args, live, wanted)
        return self.done[key]

    def _run(self, jaxpr, args, live, wanted):
        consts, inner = (jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()), opened(jaxpr)
        values = {v: _held(x, v.aval.dtype) for v, x in zip(inner.constvars, consts, strict=bool(consts))}
        values.update(zip(inner.invars, args, strict=True))

        def read(atoms) -> list[Value]:
            return [_held(x.val, x.aval.dtype) if isinstance(x, Literal) else values.get(x) for x in atoms]

        total, rest = self._parts(inner, live, wanted)
        for eqn, *masks in rest:
            cost, outs = self._equation(eqn, read(eqn.invars), *masks)
            total = total if cost is NOTHING else total + cost
            values.update(zip(eqn.outvars, outs, strict=True))
        return total, [x if asked else None for x, asked in zip(read(inner.outvars), wanted, strict=True)]

    def _parts(self, jaxpr: Jaxpr, live: Mask, wanted: Mask) -> tuple[Cost, list[tuple[JaxprEqn, Mask, Mask]]]:
        """(cost of the equations that hold no others, those to go through: that do, or whose values are followed)."""
        key = jaxpr, live, wanted
        if key not in self.parts:
            needed, followed = self.slices.of(jaxpr, live, False).outs, self.slices.of(jaxpr, wanted, True).outs
            every = [x for x in zip(jaxpr.eqns, needed, followed, strict=True) if any(x[1]) or any(x[2])]
            plain = sum((equation_cost(eqn, self.sizes) for eqn, outs, _ in every if any(outs) and not holds_others(eqn)), NOTHING)
            self.parts[key] = plain, [x for x in every if any(x[2]) or holds_others(x[0])]
        return self.parts[key]

    def _equation(self, eqn: JaxprEqn, args: list[Value], live: Mask, wanted: Mask) -> tuple[Cost, Sequence[Value]]:
        if eqn.primitive.name == "shard_map":
            self.sizes = dict(eqn.params["mesh"].shape)
        if (jaxpr := called(eqn)) is not None:
            return self.run(jaxpr, args, live, wanted)
        if eqn.primitive.name == "cond":
            return self._branch(eqn, args, live, wanted)
        if (loop := Loop.of(eqn)) is not None:
            return self._loop(eqn, loop, args, live, wanted)
        return NOTHING, self._values(eqn, args)

    def _branch(self, eqn, args, live, wanted):
        """The branch that is taken; where that is not known, the costliest."""
        possible, (which, *rest) = branches(eqn), args
        if len(possible) == 1:
            return self.run(possible[0], rest, live, wanted)
        if isinstance(which, np.ndarray):
            return self.run(possible[np.clip(int(which), 0, len(possible) - 1)], rest, live, wanted)
        costs = [self.run(branch, rest, live, wanted)[0] for branch in possible]
        return max(costs, key=lambda c: (c.flops, c.memory_bytes, c.communication_bytes)), [None] * len(eqn.outvars)

    def _loop(self, eqn, loop: Loop, args, live, wanted):
        asked, consts, carry, xs = loop.split(args)
        ys = [None] * (len(eqn.outvars) - loop.carry)
        if loop.length == 0:
            return NOTHING, [*carry, *ys]
        masks = self.slices.loop(loop, live, False)[1], self.slices.loop(loop, wanted, True)[1]

        def run(k: int, carry: list[Value]) -> tuple[Cost, list[Value]]:
            """Iteration k."""
            k = loop.length - 1 - k if loop.reverse else k
            return self.run(loop.body, [*consts, *carry, *(None if x is None else x[k, ...] for x in xs)], *masks)

        steps = _steps(run, carry, _PROBES if loop.length is None else min(_PROBES, loop.length))
        trips = loop.length if loop.condition is None else _trips(loop, asked, carry, steps)
        if trips is None:
            return run(0, carry)[0] + Cost(unknown_loops=frozenset({_where(eqn)})), [*_after(None, carry, steps), *ys]
        # iterations differ where the body's own loops and branches, or a number that is asked for afterwards, are no line
        differ = any(self.slices.of(loop.body, (False,) * len(masks[0]), True).ins[loop.consts :])
        if differ or any(x and step is None for x, step in zip(wanted[: loop.carry], steps, strict=True)):
            cost, after = (_each if trips <= _SAMPLES else _sample)(run, carry, steps, trips)
        else:
            cost, after = run(0, carry)[0] * trips, _after(trips, carry, steps)
        return cost, [*after, *ys]

    def _values(self, eqn: JaxprEqn, args: list[Value]) -> list[Value]:
        """Of an equation's outputs: by the primitive itself, on numbers."""
        name, p = eqn.primitive.name, eqn.params
        if (guess := guess_in(eqn)) is not None:
            return [guess]
        if name == "axis_index":
            return [np.asarray(self.owner.get(p["axis_name"], self.sizes[p["axis_name"]] - 1), np.int32)]
        if not all(isinstance(x, np.ndarray) for x in args) or not all(_follows(v.aval.dtype, v.aval.size) for v in eqn.outvars):
            return [None] * len(eqn.outvars)
        if name == "all_gather":
            return [_gathered(args[0], p)]
        if name in ("pmax", "pmin"):
            return args
        if "axis_name" in p or name in ("psum",):
            return [None] * len(eqn.outvars)
        outs = eqn.primitive.bind(*args, **p)
        return [np.asarray(x) for x in (outs if eqn.primitive.multiple_results else [outs])]


def _follows(dtype, size: int) -> bool:
    return (jax.dtypes.issubdtype(dtype, np.integer) or dtype == np.bool_) and size <= _LARGEST


def _held(x, dtype) -> np.ndarray | None:
    """A constant as a known value, where it is one to follow."""
    return np.asarray(x, dtype) if x is not None and _follows(dtype, np.size(x)) else None


def _gathered(x: np.ndarray, p: Mapping) -> np.ndarray:
    """As if all owners had this one's."""
    join = np.concatenate if p["tiled"] else np.stack
    return join([x] * p["axis_size"], p["all_gather_dimension"])


def _steps(run, carry: list[Value], probes: int) -> list[np.ndarray | None]:
    """By what each carried value grows every iteration, None where it is unknown or does not grow evenly."""
    if all(x is None for x in carry):
        return [None] * len(carry)
    seen = [carry]
    for k in range(probes):
        seen.append(run(k, seen[-1])[1][: len(carry)])
    return [_step(list(values)) for values in zip(*seen, strict=True)]


def _step(values: list[Value]) -> np.ndarray | None:
    if any(x is None for x in values):
        return None
    if isinstance(values[0], float):
        return _STILL if len(set(values)) == 1 else None
    steps = np.diff(np.asarray(values, np.int64), axis=0)
    return steps[0, ...] if (steps == steps[0]).all() else None


def _after(k: float | None, carry: list[Value], steps: list) -> list[Value]:
    """Carried values after k iterations (None: nobody knows how many), where they grow evenly."""
    def one(x, step):
        if step is None or not step.any():
            return None if step is None else x
        return np.asarray(x + k * step, x.dtype) if k is not None and k == int(k) else None

    return [one(x, step) for x, step in zip(carry, steps, strict=True)]


def _trips(loop: Loop, asked: list[Value], carry: list[Value], steps: list) -> float | None:
    """Of a `while` whose condition is `counter < bound`: whole where the bound is known, maybe not where it is expected."""
    condition = opened(loop.condition)
    if [eqn.primitive.name for eqn in condition.eqns] != ["lt"] or condition.eqns[0].outvars[0] is not condition.outvars[0]:
        return None
    given = dict(zip(condition.invars, zip([*asked, *carry], [*[_STILL] * len(asked), *steps], strict=True), strict=True))
    (counter, step), (bound, still) = (
        (_held(x.val, x.aval.dtype), _STILL) if isinstance(x, Literal) else given[x] for x in condition.eqns[0].invars)
    if not isinstance(counter, np.ndarray) or bound is None or step is None or still is None or still != 0 or step <= 0:
        return None
    trips = max(0.0, (float(bound) - float(counter)) / float(step))
    return trips if isinstance(bound, float) else math.ceil(trips)


def _each(run, carry: list[Value], steps: list, trips: float) -> tuple[Cost, list[Value]]:
    """(cost, carried values after the loop), iteration by iteration; of a number of trips that is not whole, the mean's multiple."""
    total, values, whole = NOTHING, carry, math.ceil(trips)
    for k in range(whole):
        cost, outs = run(k, values)
        total, values = total + cost, outs[: len(carry)]
    return total * (trips / max(1, whole)), values if trips == whole else _after(trips, carry, steps)


def _sample(run, carry: list[Value], steps: list, trips: float) -> tuple[Cost, list[Value]]:
    """The same of many iterations, from some of them; what is carried is known where it grows evenly."""
    half = [int((s + 0.5) * trips / _SAMPLES) for s in range(_SAMPLES // 2)]
    total = NOTHING
    for k in (*half, *(math.ceil(trips) - 1 - k for k in half)):
        total += run(k, _after(k, carry, steps))[0]
    return total * (trips / _SAMPLES), _after(trips, carry, steps)


def _where(eqn: JaxprEqn) -> str:
    """The innermost line outside of JAX that made an equation."""
    trace = eqn.source_info.traceback
    frames = [] if trace is None else [f for f in trace.frames if "/jax/" not in f.file_name]
    return f"{Path(frames[0].file_name).name}:{frames[0].line_num}" if frames else "somewhere"
