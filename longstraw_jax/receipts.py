"""Receipts: what a step did, at what size, in which time and memory, as one JSON object."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field

import jax

from longstraw_jax.policy import Policy
from longstraw_jax.state import tree_bytes


@dataclass
class Stage:
    """Time and work of one stage, summed over a step's groups."""

    seconds: float = 0.0
    """Running, compilation apart."""
    compile_seconds: float = 0.0
    tokens: int = 0
    """Positions that went through the model forward (and, in replay, backward)."""
    peak_device_bytes: int = 0
    """Of the stage's largest program, by the compiler's count."""

    def as_dict(self) -> dict:
        rate = self.tokens / self.seconds if self.seconds > 0 else None
        return {**vars(self), "tokens_per_second": rate}


@dataclass
class Receipt:
    """One step of one policy. `as_dict` keeps the keys that other programs may rely on."""

    model: str
    positions: int
    """Prompt and longest response of the largest group."""
    group: int
    mesh: dict[str, int]
    gradient: str
    prompt_gradient_window: int | None
    """Captured positions that the gradient goes back through; None: all of them (with gradient "full")."""
    loss: float
    grad_norm: float
    step: int
    """Updates so far, this one included."""
    updated: bool
    """False where the gradient was exactly 0, so that nothing moved."""
    stages: dict[str, Stage]
    device_bytes: dict[str, int]
    """Bytes one device holds between the stages, by part."""
    host_bytes: dict[str, int]
    """What waits in the host's memory for one device, by part."""
    metrics: list[dict]
    """Per group; see `objective.metrics`."""
    prompts: list[str] = field(default_factory=list)
    """SHA-256 of each prompt's token ids."""

    @property
    def peak_device_bytes(self) -> int:
        return max(stage.peak_device_bytes for stage in self.stages.values())

    def as_dict(self) -> dict:
        return {
            **vars(self), "stages": {name: stage.as_dict() for name, stage in self.stages.items()},
            "peak_device_bytes": self.peak_device_bytes, **environment(),
        }


def environment() -> dict:
    """The software and the devices a figure belongs to."""
    from longstraw_jax import __version__

    devices = jax.devices()
    return {"version": __version__, "jax": jax.__version__, "python": platform.python_version(),
            "device": f"{len(devices)} x {devices[0].device_kind}", "platform": devices[0].platform}


def parameter_bytes(policy: Policy, optimizer_state) -> dict[str, int]:
    """Bytes per device that stay from step to step."""
    arrays = [x for x in jax.tree.leaves(optimizer_state) if hasattr(x, "sharding")]
    return {"weights": tree_bytes(policy.frozen), "trainable": tree_bytes(policy.trainable), "optimizer": tree_bytes(arrays)}
