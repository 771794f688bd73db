"""A plan against what happens: the step that was planned, run on the devices at hand with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from longstraw_jax.models.registry import make_model
from longstraw_jax.planner.plan import Plan
from longstraw_jax.planner.stages import Workload
from longstraw_jax.policy import random_policy
from longstraw_jax.transaction import Transaction
from longstraw_jax.types import Group, Response


@dataclass(frozen=True)
class Measurement:
    """Of one step; compilation apart."""

    seconds: dict[str, float]
    """By stage."""
    peak_bytes: int | None
    """Of the fullest device, by its allocator; None where it keeps no account."""


def measure(workload: Workload, mesh: Mesh, seed: int = 0) -> Measurement:
    """Runs two steps on random weights and tokens and takes the second's times: the first one compiles."""
    w = workload
    model = make_model(w.spec, mesh, dtype=w.dtype, lora=w.lora, sizes=w.sizes, memory=w.memory, weights=w.weights)
    step = Transaction(random_policy(model, mesh, seed), [_group(w, seed)], optimizer=w.optimizer, gradient=w.gradient)
    step.step()
    stages = step.step().stages
    return Measurement({name: stage.seconds for name, stage in stages.items()}, _peak_bytes(mesh))


def _group(w: Workload, seed: int) -> Group:
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, w.spec.vocab_size, count)

    return Group(tokens(w.prompt), tuple(Response(tokens(w.response), reward=float(i)) for i in range(w.group)))


def _peak_bytes(mesh: Mesh) -> int | None:
    stats = [device.memory_stats() for device in mesh.devices.flat]
    return max(s["peak_bytes_in_use"] for s in stats) if all(s and "peak_bytes_in_use" in s for s in stats) else None


def rows(plan: Plan, measurement: Measurement | None) -> list[dict]:
    """A row for each stage, and one for the whole step: what was planned and, where a step was run, what was measured."""
    w = plan.step.workload
    shape = f"{w.spec.num_hidden_layers} layers, {w.positions} positions, {w.group} x {w.response}, {w.gradient.kind}"
    measured = measurement.seconds if measurement else {}
    device = f"{plan.step.mesh.size} x {jax.devices()[0].device_kind}"

    def row(stage: str, planned: int, estimated: float, seconds: float | None, peak: int | None) -> dict:
        return {"stage": stage, "shape": shape, "implementation": f"{w.weights} weights, pages on the {w.memory}", "device": device,
                "seconds": seconds, "compiled_for": plan.chip.kind, "estimated_seconds": estimated, "planned_bytes": planned,
                "peak_bytes": peak}

    stages = [row(name, s.device_bytes, s.estimate.seconds, measured.get(name), None) for name, s in plan.stages.items()]
    peak = measurement.peak_bytes if measurement else None
    return [*stages, row("step", plan.peak_device_bytes, plan.estimated_seconds, sum(measured.values()) if measured else None, peak)]
