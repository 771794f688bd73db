"""Guesses beside numbers that only the data knows: how often a loop will run, for whoever counts what a program costs."""

from __future__ import annotations

import math

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn
from jaxtyping import Array, Int

_MARK = "expected:"


def expected(count: Int[Array, ""], guess: float) -> jax.Array:
    """`count` as it is. Whoever reads the program as a jaxpr finds `guess` beside it; what is compiled knows nothing of it."""
    return checkpoint_name(count, f"{_MARK}{guess!r}")


def guess_in(eqn: JaxprEqn) -> float | None:
    """The guess of an equation that `expected` made."""
    name = eqn.params.get("name") if eqn.primitive.name == "name" else None
    return float(name.removeprefix(_MARK)) if name is not None and name.startswith(_MARK) else None


def expected_blocks(rows: float, size: int) -> float:
    """Blocks of `size` that hold what falls to one of many by chance, `rows` in the mean: E ceil(X / size), X Poisson."""
    spread = 20 + 10 * math.sqrt(rows)

    def chance(n):
        return math.exp(n * math.log(rows) - rows - math.lgamma(n + 1))

    return sum(chance(n) * -(-n // size) for n in range(max(1, int(rows - spread)), int(rows + spread))) if rows else 0.0
