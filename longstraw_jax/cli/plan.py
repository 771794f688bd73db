"""`longstraw plan`: what a step takes on devices that are not at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from longstraw_jax.cli.display import note
from longstraw_jax.cli.options import Blocks, Gradient, Held, output_file
from longstraw_jax.config import LoraConfig, OptimizerConfig
from longstraw_jax.deviceless import named_chip, require_compiler
from longstraw_jax.errors import InputError
from longstraw_jax.models.checkpoint import read_config, write_json
from longstraw_jax.models.registry import Spec, named_spec, spec_of_config
from longstraw_jax.planner.chart import draw
from longstraw_jax.planner.estimate import Efficiency
from longstraw_jax.planner.plan import RESERVE, Plan, make_plan
from longstraw_jax.planner.search import doubling, largest
from longstraw_jax.planner.stages import Workload
from longstraw_jax.sharding import parse_mesh

SWEPT = ("positions", "group", "response", "mesh")

PUBLISHED = {("qwen3.6-27b", "context=8"): ((2_097_152, 97.711), (4_456_448, 83.894))}
"""(positions, 10^9 bytes per device) by model and mesh: LongStraw (2026) on H20s, G=8; at the larger one the adapter was off on the
prompt."""


@dataclass(frozen=True)
class PlanCommand:
    """Compiles every stage of a step for a named device, without having it: bytes by part, work, an estimate of the time.

    Exit code 0 also where the step does not fit; the table and `fits` in the JSON say so.
    """

    model: str = "qwen3.6-27b"
    """A spec's name or a Hugging Face directory; only its config.json is read."""
    device: str = "h20"
    """h20 (= h20-141), h20-96, h100, h200, a100-80 or b200."""
    memory_gb: float | None = None
    """Another memory than the device's own, in 10^9 bytes."""
    mesh: str = "context=8"
    """Devices: context=8, or context=1,expert=32."""
    positions: int = 2_097_152
    """Of the prompt and one response together."""
    response: int = 8_192
    """Tokens of a response."""
    group: int = 8
    rank: int = 16
    targets: str = ""
    """Linear layers that have an adapter, as q_proj,down_proj; empty: all of them."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    sweep: str | None = None
    """Plans over a range instead: positions=262144..16777216 (doubling), group=2,8, response=.., or mesh=context=4;context=8."""
    largest: bool = False
    """Finds the most positions that fit, from --positions on."""
    reserve_gb: float = RESERVE / 1e9
    """Left free on every device for what the compiler does not count, in 10^9 bytes."""
    compute_efficiency: float = Efficiency.compute
    """Share of the chip's matrix rate that the time's estimate assumes."""
    json: Path | None = None
    """Writes the plan, or the list of plans of a sweep, here."""
    plot: Path | None = None
    """Draws bytes per device against positions here (with --sweep positions=..)."""
    held: Annotated[Held, tyro.conf.arg(name="")] = field(default_factory=Held)
    through: Annotated[Gradient, tyro.conf.arg(name="")] = field(default_factory=Gradient)
    blocks: Annotated[Blocks, tyro.conf.arg(name="")] = field(default_factory=Blocks)

    def run(self) -> int:
        output_file(self.json)
        output_file(self.plot)
        if self.sweep and self.largest:
            raise InputError("--sweep and --largest were both given; wanted one of them")
        if self.plot and not (self.sweep or "").startswith("positions="):
            raise InputError("--plot draws bytes against positions; wanted it with --sweep positions=..")
        if not 0 < self.compute_efficiency <= 1:
            raise InputError(f"--compute-efficiency is {self.compute_efficiency}; wanted a share of 1")
        cases = list(self._cases())
        require_compiler()
        if self.largest:
            shown = [largest(self._plan, self.positions)]
        else:
            shown = [case._plan() for case in cases]
        plans = [plan.as_dict() for plan in shown]
        if self.json:
            write_json(self.json, plans if self.sweep else plans[0])
        if self.plot:
            draw(self.plot, plans, f"{self.model} on {self.mesh}, {self.through.gradient} gradient",
                 PUBLISHED.get((self.model, self.mesh), ()))
        if self.sweep:
            _show_sweep(plans)
        else:
            _show(shown[0])
        return 0

    def _cases(self) -> Iterator[PlanCommand]:
        """This command once for every value of `--sweep`; each is checked before the first is compiled."""
        for name, value in self._swept():
            case = replace(self, sweep=None, **{name: value}) if name else self
            case._check()
            yield case

    def _check(self) -> None:
        """Raises for what cannot be planned, before anything is compiled."""
        self._workload(self.positions)
        parse_mesh(self.mesh)
        named_chip(self.device, self.memory_gb)

    def _swept(self) -> list[tuple[str | None, object]]:
        if not self.sweep:
            return [(None, None)]
        name, _, text = self.sweep.partition("=")
        if name == "mesh" and text:
            return [(name, value) for value in text.split(";")]
        first, dots, last = text.partition("..")
        values = [first, last] if dots else text.split(",")
        if name not in SWEPT or not all(value.isdigit() and int(value) for value in values) or dots and int(first) > int(last):
            raise InputError(f"--sweep {self.sweep!r}; wanted one of {', '.join(SWEPT)} with its values, as positions=262144..16777216, "
                             "group=2,8 or 'mesh=context=4;context=8'")
        return [(name, value) for value in (doubling(int(first), int(last)) if dots else map(int, values))]

    def _spec(self) -> Spec:
        return spec_of_config(read_config(self.model)) if os.path.isdir(self.model) else named_spec(self.model)

    def _workload(self, positions: int) -> Workload:
        lora = LoraConfig(self.rank, targets=tuple(filter(None, self.targets.split(","))))
        return Workload(
            self._spec(), positions, self.response, self.group, self.through.config(), lora, self.blocks.sizes(),
            OptimizerConfig(self.optimizer), **self.held.options())

    def _plan(self, positions: int | None = None, only: str | None = None) -> Plan:
        positions = self.positions if positions is None else positions
        return make_plan(
            self.model, self._workload(positions), named_chip(self.device, self.memory_gb), parse_mesh(self.mesh), only=only,
            reserve=self.reserve_gb * 1e9, efficiency=Efficiency(self.compute_efficiency),
            note=lambda text: note(f"{positions:,} positions: {text}"))


def _show(plan: Plan) -> None:
    console, w, gb = Console(highlight=False), plan.step.workload, 1e9
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.step.mesh.shape.items())
    console.print(f"{plan.model}, {w.weights} weights, on {plan.step.mesh.size} x {plan.chip.kind} ({axes}): {w.positions:,} positions, "
                  f"{w.group} responses of {w.response:,}, {w.gradient.kind} gradient")
    stages = Table(title="one device: 10^9 bytes, 10^15 operations, 10^12 bytes moved and exchanged, estimated seconds")
    for column in ("stage", "peak", "temp", "PFLOP", "moved", "exch.", "seconds", "bound by", "compiling"):
        stages.add_column(column, justify="left" if column in ("stage", "bound by") else "right")
    for name, s in plan.stages.items():
        stages.add_row(
            name, f"{s.device_bytes / gb:.2f}", f"{s.compiled.temporaries / gb:.2f}", f"{s.cost.flops / 1e15:,.2f}",
            f"{s.cost.memory_bytes / 1e12:,.2f}", f"{sum(s.cost.exchanged.values()) / 1e12:,.3f}", f"{s.estimate.seconds:,.1f}",
            s.estimate.bound, f"{s.compiled.seconds:.0f} s")
    console.print(stages)
    parts = Table(title=f"at the peak, in {plan.peak_stage}")
    for column in ("part", "GB"):
        parts.add_column(column, justify="left" if column == "part" else "right")
    held = plan.device_bytes() | {f"{name} (host)": size for name, size in plan.host_bytes().items()}
    for name, size in held.items():
        parts.add_row(name, f"{size / gb:.2f}")
    console.print(parts)
    verdict = "fits" if plan.fits else "does not fit"
    e = plan.efficiency
    console.print(f"{plan.peak_device_bytes / gb:.2f} GB per device and {plan.reserve / gb:.1f} GB in reserve, of "
                  f"{plan.chip.memory / gb:.2f} GB: {verdict}.")
    console.print(f"One step (without scoring): {plan.estimated_seconds:,.0f} s, an estimate from data sheets: "
                  f"{e.compute:.0%} of the matrix rate, {e.memory:.0%} of the memory's, {e.link:.0%} of the links'.")


def _show_sweep(plans: list[dict]) -> None:
    """The parts are in the JSON and in the plot."""
    table = Table(title=f"{plans[0]['model']} on {plans[0]['device']}: peak per device, and a step's estimated time")
    for column in ("mesh", "positions", "group", "response", "GB", "in stage", "seconds", "fits"):
        table.add_column(column, justify="left" if column in ("mesh", "in stage", "fits") else "right")
    for plan in plans:
        mesh = "x".join(str(size) for size in plan["mesh"].values())
        table.add_row(
            mesh, f"{plan['positions']:,}", str(plan["group"]), f"{plan['response']:,}", f"{plan['peak_device_bytes'] / 1e9:.2f}",
            plan["peak_stage"], f"{plan['estimated_seconds']:,.0f}", "yes" if plan["fits"] else "no")
    Console(highlight=False).print(table)
