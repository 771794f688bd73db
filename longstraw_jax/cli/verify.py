"""`longstraw verify`: the levels of evidence on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from longstraw_jax.cli.display import note
from longstraw_jax.cli.options import Blocks, open_mesh, output_file
from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.evidence import Case, random_group, verify
from longstraw_jax.models.checkpoint import read_config, write_json
from longstraw_jax.models.registry import named_spec, spec_of_config
from longstraw_jax.sharding import make_mesh

CLAIMS = {"1": "execution", "2": "response operators", "3": "distributed update", "4": "full gradient"}

# small, so that short sequences still have many pages, blocks and chunks
_SIZES = BlockSizes(page=8, chunk=128, block=32, queries=8, keys=32, logits=8, recurrence=16)


@dataclass(frozen=True)
class Verify:
    """Shows on this machine, level by level, that the transaction is what it claims to be. Exit code 1 if a level fails."""

    model: str = "qwen3.6-tiny"
    """A spec's name (random weights) or a Hugging Face directory, small enough for a plain forward pass on one device."""
    mesh: str = "context=4"
    """The mesh to verify; it is compared with a single device."""
    prompt_length: int = 200
    response_length: int = 70
    """Of the longest response; the others are shorter."""
    group: int = 3
    dtype: Literal["float64", "float32"] = "float64"
    """float64 shows rounding errors for what they are; float32 is what accelerators are fast at."""
    trainable: Literal["lora", "all"] = "lora"
    """Whose gradients are compared: a random adapter's on every linear layer, or every parameter's."""
    seed: int = 0
    json: Path | None = None
    """Writes the levels here."""
    blocks: Annotated[Blocks, tyro.conf.arg(name="")] = field(default_factory=Blocks)

    def run(self) -> int:
        output_file(self.json)
        for name, least in (("prompt_length", 2), ("response_length", 1), ("group", 2)):
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; wanted at least {least}")
        spec = spec_of_config(read_config(self.model)) if os.path.isdir(self.model) else named_spec(self.model)
        jax.config.update("jax_enable_x64", self.dtype == "float64")
        mesh = open_mesh(self.mesh)
        meshes = [make_mesh()] + ([mesh] if mesh.size > 1 else [])
        group = random_group(spec.vocab_size, self.prompt_length, self.response_length, self.group, self.seed)
        lora = LoraConfig(rank=4, alpha=8) if self.trainable == "lora" else None
        case = Case(self.model, meshes, group, self.dtype, self.blocks.sizes(_SIZES), lora, self.seed)
        report = verify(case, note)
        if self.json:
            write_json(self.json, report)
        _show(report)
        return exit_code(report)


def exit_code(report: dict) -> int:
    """1 if a level failed; one that was not run is no failure."""
    return int(any(level["status"] == "fail" for level in report["levels"].values()))


def _show(report: dict) -> None:
    table = Table(title=f"{report['model']} in {report['dtype']}: {report['positions']:,} positions, group of {report['group']}")
    for column in ("level", "claim", "status", "measured"):
        table.add_column(column)
    for number, level in report["levels"].items():
        table.add_row(number, CLAIMS[number], level["status"], _measured(level))
    Console(highlight=False).print(table)
    _show_worst(report["levels"]["4"])


def _measured(level: dict) -> str:
    if "reason" in level:
        return level["reason"]
    if "receipts" in level:
        return "\n".join(f"loss {r['loss']:.9g}, gradient norm {r['grad_norm']:.9g} on {r['mesh']}" for r in level["receipts"])
    if "autodiff" in level:
        return "\n".join(_gradient_line(name, level[name]) for name in ("autodiff", "pytorch", "response"))
    lines = []
    for name in ("max_logprob_difference", "max_relative_difference", "replicas_bitwise_equal"):
        lines += [f"{name.replace('_', ' ')} on {mesh}: {value:.2g}" if isinstance(value, float) else
                  f"{name.replace('_', ' ')} on {mesh}: {'yes' if value else 'no'}" for mesh, value in level.get(name, {}).items()]
    return "\n".join(lines)


def _gradient_line(name: str, figures: dict) -> str:
    if "reason" in figures:
        return f"{name}: not run, {figures['reason']}"
    title = "response gradient to it" if name == "response" else f"to {name}"
    whole = f", cosine of all together {figures['cosine']:.4f}" if "cosine" in figures else ""
    return f"{title}: relative difference up to {figures['max_relative_difference']:.2g}, cosine from {figures['min_cosine']:.9g}{whole}"


def _show_worst(level: dict) -> None:
    """The parameters that are farthest off."""
    table = Table(title="full gradient: the farthest parameters")
    for column in ("compared with", "parameter", "relative difference", "cosine", "largest deviation"):
        table.add_column(column, overflow="fold")
    for name in ("autodiff", "pytorch", "response"):
        for row in level[name].get("worst", []):
            figures = f"{row['relative_difference']:.2g}", f"{row['cosine']:.9f}", f"{row['max_deviation']:.2g}"
            table.add_row(name, row["parameter"], *figures)
    Console(highlight=False).print(table)
