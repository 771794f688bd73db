"""Plans over a range, and the largest workload that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from longstraw_jax.errors import InputError

P = TypeVar("P")
"""A `Plan`, or what looks like one."""
Planner = Callable[..., P]
"""(positions, the name of a stage or None for all of them) -> plan."""


def doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, .. and `last`."""
    values = [first]
    while values[-1] * 2 < last:
        values.append(values[-1] * 2)
    return values + ([last] if last > values[-1] else [])


def largest(planner: Planner[P], start: int) -> P:
    """The plan with the most positions that fits, to one chunk of the prompt.

    The search compiles the stage that peaks; at its end all of them, and goes on below if another one then peaks too high.
    Raises InputError where nothing fits.
    """
    plan = planner(start)
    chunk, least = plan.step.chunk, plan.step.workload.response + 2
    fits, over = _closed_in(planner, plan, plan.peak_stage, None, chunk, least)
    while fits and not (whole := planner(fits)).fits:
        fits, over = _closed_in(planner, whole, whole.peak_stage, fits, chunk, least)
    if not fits:
        raise InputError(f"not even {over:,} positions fit on {plan.step.mesh.size} x {plan.chip.name}; wanted more devices, NF4 weights, "
                         "pages on the host or smaller blocks")
    return whole


def _closed_in(planner: Planner[P], plan: P, stage: str, over: int | None, chunk: int, least: int) -> tuple[int | None, int | None]:
    """(the most positions at which `stage` fits, the fewest at which it does not), a chunk apart.

    Bytes grow linearly but for a step here and there (another block size, another exchange), so a line through the last two
    plans guesses the next.
    """
    fits, before = None, None
    while True:
        here = _positions(plan)
        fits, over = (here, over) if plan.fits else (fits, here)
        if over and (over - fits <= chunk if fits else over <= least):
            return fits, over
        low, high = (fits + chunk if fits else least), (over - chunk if over else None)
        guess = _guess(plan, before, chunk)
        before, plan = plan, planner(max(low, guess if high is None else min(guess, high)), stage)


def _positions(plan: P) -> int:
    return plan.step.workload.positions


def _guess(plan: P, before: P | None, chunk: int) -> int:
    """Where the line through two plans meets the device's memory, whole chunks from the last one's positions."""
    room, x = plan.chip.memory - plan.reserve - plan.peak_device_bytes, _positions(plan)
    run = x - _positions(before) if before else 0
    rise = plan.peak_device_bytes - before.peak_device_bytes if before else 0
    if rise * run <= 0:
        return x * 2 if room > 0 else x // 2
    return x + int(room * run / rise) // chunk * chunk
