"""Which values of a jaxpr others depend on: those that its results need, and those that decide how often its loops run.

The first tells what is dead code, which the compiler drops and nobody should count (the results of a forward pass that is there
for its transpose alone); the second what has to be followed through the program, which is little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from longstraw_jax.models.layers.expected import guess_in

Mask = tuple[bool, ...]

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr",
          "shard_map": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Equations that run a jaxpr once, on all of their operands, by the parameter that holds it."""


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def called(eqn: JaxprEqn) -> Jaxpr | ClosedJaxpr | None:
    """What an equation runs, where it is a plain call."""
    name = eqn.primitive.name
    return eqn.params[_CALLS[name]] if name in _CALLS else None


def branches(eqn: JaxprEqn) -> Sequence[ClosedJaxpr]:
    """What a `cond` may run. Where platforms decide: what all but those with a kernel do, whose inside would count as nothing."""
    return eqn.params["branches"][-1:] if eqn.params.get("branches_platforms") else eqn.params["branches"]


def holds_others(eqn: JaxprEqn) -> bool:
    """Whether an equation runs equations of its own."""
    return eqn.primitive.name in (*_CALLS, "cond", "scan", "while")


@dataclass(frozen=True)
class Loop:
    """A `scan` or a `while` in one form: body(consts, carry, xs) -> (carry, ys)."""

    body: ClosedJaxpr
    condition: ClosedJaxpr | None
    """Of (condition's consts, carry), which stand before all else; None for a scan."""
    condition_consts: int
    consts: int
    carry: int
    length: int | None
    """Of a scan."""
    reverse: bool

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Loop | None:
        p = eqn.params
        if eqn.primitive.name == "scan":
            return cls(p["jaxpr"], None, 0, *_scan_operands(eqn), p["length"], p["reverse"])
        if eqn.primitive.name == "while":
            return cls(p["body_jaxpr"], p["cond_jaxpr"], p["cond_nconsts"], p["body_nconsts"], len(eqn.outvars), None, False)
        return None

    def split(self, values: Sequence) -> tuple[list, list, list, list]:
        """An equation's operands -> (condition's consts, consts, carry, xs)."""
        ends = (self.condition_consts, self.condition_consts + self.consts, self.condition_consts + self.consts + self.carry)
        return tuple(list(values[a:b]) for a, b in zip((0, *ends), (*ends, None), strict=True))


def _scan_operands(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    p = eqn.params
    if "num_consts" in p:
        return p["num_consts"], p["num_carry"]
    consts, carry, _ = p["ft_in"].update(eqn.invars).unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


class Slice(NamedTuple):
    """The part of a jaxpr that some of its results need."""

    ins: Mask
    """Of the jaxpr's inputs."""
    outs: list[Mask]
    """Of each equation's outputs; none of them: the equation is not needed."""


@dataclass
class Slices:
    """Slices of the jaxprs of one program, each made once.

    `decisive`: also what decides how often a loop runs or which branch is taken, whether or not a result needs it.
    """

    done: dict = field(default_factory=dict)

    def of(self, jaxpr: Jaxpr | ClosedJaxpr, outs: Mask, decisive: bool) -> Slice:
        jaxpr = opened(jaxpr)
        key = jaxpr, outs, decisive
        if key not in self.done:
            self.done[key] = self._made(jaxpr, outs, decisive)
        return self.done[key]

    def _made(self, jaxpr: Jaxpr, outs: Mask, decisive: bool) -> Slice:
        needed = {v for v, wanted in zip(jaxpr.outvars, outs, strict=True) if wanted and isinstance(v, Var)}
        masks = []
        for eqn in reversed(jaxpr.eqns):
            masks.append(tuple(v in needed for v in eqn.outvars))
            if decisive or any(masks[-1]):
                ins = self._ins(eqn, masks[-1], decisive)
                needed |= {v for v, wanted in zip(eqn.invars, ins, strict=True) if wanted and not isinstance(v, Literal)}
        return Slice(tuple(v in needed for v in jaxpr.invars), masks[::-1])

    def _ins(self, eqn: JaxprEqn, outs: Mask, decisive: bool) -> Mask:
        """The operands that an equation's wanted outputs need."""
        if (jaxpr := called(eqn)) is not None:
            return self.of(jaxpr, outs, decisive).ins
        if (loop := Loop.of(eqn)) is not None:
            return self.loop(loop, outs, decisive)[0]
        if eqn.primitive.name == "cond":
            parts = [self.of(branch, outs, decisive).ins for branch in branches(eqn)]
            return (len(parts) > 1, *map(any, zip(*parts, strict=True)))
        if decisive and guess_in(eqn) is not None:
            return (False,)  # what it stands for is not asked
        return (any(outs),) * len(eqn.invars)

    def loop(self, loop: Loop, outs: Mask, decisive: bool) -> tuple[Mask, Mask]:
        """(operands that a loop's wanted outputs need, outputs that its body must give for them)."""
        carry, rest = outs[: loop.carry], outs[loop.carry :]
        asked: Mask = ()
        if loop.condition is not None:
            ins = self.of(loop.condition, (True,), False).ins
            asked, carry = ins[: loop.condition_consts], _either(carry, ins[loop.condition_consts :])
        while True:
            ins = self.of(loop.body, (*carry, *rest), decisive).ins
            wider = _either(carry, ins[loop.consts : loop.consts + loop.carry])
            if wider == carry:
                return (*asked, *ins[: loop.consts], *carry, *ins[loop.consts + loop.carry :]), (*carry, *rest)
            carry = wider


def _either(a: Mask, b: Mask) -> Mask:
    return tuple(x or y for x, y in zip(a, b, strict=True))
