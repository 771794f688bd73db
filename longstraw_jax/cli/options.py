"""Flags that several commands share, and what they build."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from jax.sharding import Mesh

from longstraw_jax.config import BlockSizes, GradientConfig
from longstraw_jax.errors import InputError
from longstraw_jax.sharding import make_mesh, offer_cpu_devices, parse_mesh


@dataclass(frozen=True)
class Blocks:
    """How the work is cut, in tokens. Results do not depend on it; memory and speed do. Left out: fitted to the machine."""

    page: int | None = None
    """Tokens that a context owner holds in a row."""
    chunk: int | None = None
    """Prompt tokens captured by one program call."""
    block: int | None = None
    """Response tokens replayed at a time."""
    queries: int | None = None
    """Queries of one attention tile."""
    keys: int | None = None
    """Keys of one attention tile."""
    logits: int | None = None
    """Tokens whose logits exist at once."""
    recurrence: int | None = None
    """Tokens of one chunk of the delta rule."""

    def sizes(self, defaults: BlockSizes | None = None) -> BlockSizes:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return BlockSizes(**{**vars(defaults or BlockSizes()), **given})


@dataclass(frozen=True)
class Gradient:
    """Which tokens the loss is differentiated through."""

    gradient: Literal["response", "full"] = "response"
    """`response`: at the prompt's fixed resident state; `full`: the gradient of the whole sequence's loss, by one sweep back
    through the prompt for each group."""
    prompt_gradient_window: int | None = None
    """With `full`: go back through this many prompt tokens before the last and hold the state before them fixed."""
    gradient_cosine: bool = False
    """Also report the cosine to the full gradient; costs a full sweep."""
    entry_states: Literal["device", "host"] = "device"
    """With `full`: where the recurrent states between the prompt's chunks wait."""

    def config(self) -> GradientConfig:
        return GradientConfig(self.gradient, self.prompt_gradient_window, self.gradient_cosine, self.entry_states)


@dataclass(frozen=True)
class Held:
    """How a planned step holds what is large."""

    weights: Literal["nf4", "bf16"] = "nf4"
    """Of the frozen base weights."""
    memory: Literal["device", "host"] = "device"
    """Where the prompt's pages lie."""

    def options(self) -> dict[str, str]:
        """As a `Workload` takes them."""
        return dict(weights="plain" if self.weights == "bf16" else self.weights, memory=self.memory)


def open_mesh(text: str) -> Mesh:
    """The mesh that `--mesh` names; of fake CPU devices where the machine has no accelerator."""
    degrees = parse_mesh(text)
    offer_cpu_devices(degrees["context"] * degrees["expert"])
    return make_mesh(**degrees)


def output_file(path: Path | None) -> Path | None:
    """Refuses, before any work is done, a file that could not be written."""
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        given = "is a directory" if path.is_dir() else "lies in a directory that does not exist"
        raise InputError(f"output file {path} {given}; wanted a file name in an existing directory")
    return path
