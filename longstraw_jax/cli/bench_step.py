"""`longstraw bench step`: the plan's bytes and times against measured ones, on the devices at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from longstraw_jax.backend import shown_devices
from longstraw_jax.cli.display import note
from longstraw_jax.cli.options import Blocks, Gradient, Held, open_mesh, output_file
from longstraw_jax.config import LoraConfig
from longstraw_jax.deviceless import CHIPS, Chip, named_chip
from longstraw_jax.models.checkpoint import write_json
from longstraw_jax.models.registry import named_spec
from longstraw_jax.planner.measured import measure, rows
from longstraw_jax.planner.plan import make_plan
from longstraw_jax.planner.stages import Workload
from longstraw_jax.sharding import parse_mesh


@dataclass(frozen=True)
class BenchStep:
    """One GRPO step of a model's published layers with random weights, planned and, where there are GPUs, measured.

    Without a GPU the step is only compiled, and the rows have no seconds.
    """

    model: str = "qwen3.6-27b"
    """A spec's name."""
    layers: int = 8
    """The first layers of the model, as many as fit."""
    device: str | None = None
    """What to plan for; default: the GPU at hand, or an h200."""
    mesh: str = "context=1"
    positions: int = 262_144
    """Of the prompt and one response together."""
    response: int = 2_048
    group: int = 2
    json: Path | None = None
    """Writes the rows here."""
    held: Annotated[Held, tyro.conf.arg(name="")] = field(default_factory=Held)
    through: Annotated[Gradient, tyro.conf.arg(name="")] = field(default_factory=Gradient)
    blocks: Annotated[Blocks, tyro.conf.arg(name="")] = field(default_factory=Blocks)

    def run(self) -> int:
        output_file(self.json)
        workload = Workload(
            named_spec(self.model).first_layers(self.layers), self.positions, self.response, self.group, self.through.config(),
            LoraConfig(), self.blocks.sizes(), **self.held.options())
        kind, gpu = shown_devices()[0].device_kind, shown_devices()[0].platform == "gpu"
        mesh: Mesh | None = open_mesh(self.mesh) if gpu else None
        if mesh is None:
            note("there is no GPU here: the step is compiled, and not run")
        plan = make_plan(self.model, workload, self._chip(kind), parse_mesh(self.mesh), note=note)
        table = rows(plan, measure(workload, mesh) if mesh is not None else None)
        if self.json:
            write_json(self.json, table)
        _show(self.model, table)
        return 0

    def _chip(self, kind: str) -> Chip:
        at_hand = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
        return named_chip(self.device) if self.device else at_hand or named_chip("h200")


def _show(model: str, table: list[dict]) -> None:
    shown = Table(title=f"{model}: {table[0]['shape']}, on {table[0]['device']}, planned for {table[0]['compiled_for']}")
    for column in ("stage", "planned GB", "measured GB", "estimated s", "measured s"):
        shown.add_column(column, justify="left" if column == "stage" else "right")

    def figure(x: float | None, unit: float) -> str:
        return "-" if x is None else f"{x / unit:,.2f}"

    for row in table:
        shown.add_row(row["stage"], figure(row["planned_bytes"], 1e9), figure(row["peak_bytes"], 1e9), figure(row["estimated_seconds"], 1),
                      figure(row["seconds"], 1))
    Console(highlight=False).print(shown)
