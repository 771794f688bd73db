"""The plan: every stage compiled for a chip, the bytes of one device by part, the work, and an estimate of the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from longstraw_jax.deviceless import Chip, Compiled, abstract_mesh, compile_for
from longstraw_jax.models.base import Tree
from longstraw_jax.planner.cost import Cost, count
from longstraw_jax.planner.estimate import Efficiency, Estimate, estimate
from longstraw_jax.planner.stages import Stage, Step, Workload
from longstraw_jax.sharding import AnyMesh
from longstraw_jax.state import on_device, tree_bytes

RESERVE = 3e9
"""Bytes of a device that the compiler does not count: NCCL's buffers, the CUDA context, what allocation leaves between buffers."""


@dataclass(frozen=True)
class StagePlan:
    """One stage on one device."""

    compiled: Compiled
    held: dict[str, int]
    """Bytes on the device by part, its arguments and what lies beside them."""
    beside: int
    """Bytes of the latter."""
    cost: Cost
    """Of all its calls in a step."""
    estimate: Estimate

    @property
    def device_bytes(self) -> int:
        return self.compiled.device_bytes + self.beside

    def as_dict(self) -> dict:
        sent = {f"{kind} over {','.join(axes)}": size for (kind, axes), size in self.cost.exchanged.items()}
        return {"peak_device_bytes": self.device_bytes, "temporary_bytes": self.compiled.temporaries,
                "host_temporary_bytes": self.compiled.host_temporaries, "flops": self.cost.flops,
                "memory_bytes_moved": self.cost.memory_bytes, "exchanged_bytes": sent, "host_bytes_moved": self.cost.host_bytes,
                "estimated_seconds": self.estimate.seconds, "estimated_bound": self.estimate.bound,
                "compile_seconds": self.compiled.seconds}


@dataclass(frozen=True)
class Plan:
    """A workload on chips. Bytes are of one device, seconds of the whole step."""

    model: str
    chip: Chip
    step: Step
    stages: dict[str, StagePlan]
    reserve: float = RESERVE
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def peak_stage(self) -> str:
        return max(reversed(self.stages), key=lambda name: self.stages[name].device_bytes)  # of score and replay: replay

    @property
    def peak_device_bytes(self) -> int:
        return self.stages[self.peak_stage].device_bytes

    @property
    def fits(self) -> bool:
        return self.peak_device_bytes + self.reserve <= self.chip.memory

    @property
    def estimated_seconds(self) -> float:
        """Of a step with an on-policy start, whose ratios replay computes itself; a reference policy is scored beside it."""
        return sum(stage.estimate.seconds for name, stage in self.stages.items() if name != "score")

    def device_bytes(self) -> dict[str, int]:
        """By part, at the peak."""
        parts = self.stages[self.peak_stage].held
        return parts | {"temporaries": self.peak_device_bytes - sum(parts.values())}

    def host_bytes(self) -> dict[str, int]:
        parts = {name: tree_bytes(tree) for name, tree in self.step.parts.items() if jax.tree.leaves(tree) and not on_device(tree)}
        temporaries = max(stage.compiled.host_temporaries for stage in self.stages.values())
        return parts | ({"temporaries": temporaries} if temporaries else {})

    def as_dict(self) -> dict:
        w = self.step.workload
        return {
            "model": self.model, "device": self.chip.name, "mesh": dict(self.step.mesh.shape), "positions": w.positions,
            "response": w.response, "group": w.group, "gradient": w.gradient.kind, "weights": w.weights, "memory": w.memory,
            "chunk": self.step.chunk, "peak_device_bytes": self.peak_device_bytes, "peak_stage": self.peak_stage,
            "device_bytes": self.device_bytes(), "host_bytes": self.host_bytes(),
            "stages": {name: stage.as_dict() for name, stage in self.stages.items()},
            "estimated_seconds": self.estimated_seconds,
            "assumed_efficiency": vars(self.efficiency), "device_memory_bytes": self.chip.memory, "reserve_bytes": int(self.reserve),
            "fits": self.fits}


def make_plan(
    model: str, workload: Workload, chip: Chip, mesh: dict[str, int], *, only: str | None = None, reserve: float = RESERVE,
    efficiency: Efficiency | None = None, note: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles every stage of a step for `chip`.

    Args:
      mesh: {"context": n, "expert": m}.
      only: one stage's name, where the others are of no interest.
      reserve: bytes to leave to what the compiler does not count.
      note: told which stage is being compiled.

    Raises UnsupportedError where the compiler's packages are missing, InputError where the model cannot run on the mesh.
    """
    step = Step(workload, abstract_mesh(chip, **mesh))
    done: dict[tuple, Compiled] = {}
    efficiency = efficiency or Efficiency()
    stages = [stage for stage in step.stages() if only in (None, stage.name)]
    return Plan(model, chip, step, {s.name: _planned(s, step, chip, efficiency, done, note) for s in stages}, reserve, efficiency)


def _planned(stage: Stage, step: Step, chip: Chip, efficiency: Efficiency, done: dict, note: Callable[[str], None]) -> StagePlan:
    key = stage.jitted, *((x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(stage.arguments))
    if key not in done:  # scoring is replay's program
        note(f"compiling {stage.name} for {step.mesh.size} x {chip.kind}")
        done[key] = compile_for(chip, step.mesh.size, stage.jitted, stage.arguments)
    cost = count(stage.jitted.trace(*stage.arguments).jaxpr, stage.known(), _middle(step.mesh)) * stage.calls
    inside, beside = (_bytes(step.held(names)) for names in (stage.inside, stage.beside))
    seconds = estimate(cost.flops, cost.memory_bytes, cost.exchanged, cost.host_bytes, chip, dict(step.mesh.shape), efficiency)
    return StagePlan(done[key], inside | beside, sum(beside.values()), cost, seconds)


def _middle(mesh: AnyMesh) -> dict[str, int]:
    """An owner that has an average share of causal work."""
    return {axis: size // 2 for axis, size in mesh.shape.items()}


def _bytes(parts: dict[str, Tree]) -> dict[str, int]:
    return {name: tree_bytes(tree) for name, tree in parts.items() if on_device(tree)}
