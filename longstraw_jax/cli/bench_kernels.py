"""`longstraw bench kernels`: the operators on the devices at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from longstraw_jax.cli.display import note
from longstraw_jax.cli.options import output_file
from longstraw_jax.deviceless import TARGET
from longstraw_jax.errors import InputError
from longstraw_jax.kernels_pallas.bench import Rates, Subject, compiled_rows, subjects, timed_rows
from longstraw_jax.models.checkpoint import write_json


@dataclass(frozen=True)
class BenchKernels:
    """Times the kernels against XLA at their named shapes; without a GPU, compiles them for one that is not there."""

    shapes: str = ""
    """Comma-separated names of the shapes to take; default: all."""
    json: Path | None = None
    """Writes the rows here."""

    def run(self) -> int:
        output_file(self.json)
        chosen = _chosen(self.shapes)
        rows = _timed(chosen) if jax.default_backend() == "gpu" else _compiled(chosen)
        if self.json:
            write_json(self.json, rows)
        return 0


def _chosen(names: str) -> list[Subject]:
    wanted, known = set(filter(None, names.split(","))), subjects()
    if wanted - {s.shape for s in known}:
        raise InputError(f"--shapes {names!r}; wanted some of {', '.join(dict.fromkeys(s.shape for s in known))}")
    return [s for s in known if not wanted or s.shape in wanted]


def _timed(chosen: list[Subject]) -> list[dict]:
    rates = Rates.measured()
    note(f"{jax.devices()[0].device_kind}: copies {rates.copy / 1e12:.2f} TB/s, multiplies {rates.matmul / 1e12:.0f} TFLOP/s in bfloat16")
    rows = []
    for subject in chosen:
        note(f"{subject.op} {subject.shape}")
        for row in timed_rows(subject, rates):
            rows.append(row)
            if row["seconds"] is None:
                note(row["refused"])
    columns = ("us", "MB", "GFLOP", "of copy rate", "of matmul rate", "difference")
    _show("kernels, one call", columns, [r for r in rows if r["seconds"]], lambda r: (
        f"{r['seconds'] * 1e6:,.1f}", f"{r['bytes'] / 1e6:,.1f}", f"{r['flops'] / 1e9:,.1f}", f"{r['copy_share']:.0%}",
        f"{r['matmul_share']:.0%}", f"{r['max_difference']:.1g}"))
    return rows


def _compiled(chosen: list[Subject]) -> list[dict]:
    note(f"no GPU here: nothing is timed, but compiled for {TARGET.kind}")
    rows = []
    for subject in chosen:
        note(f"{subject.op} {subject.shape}")
        rows += compiled_rows(subject)
    _show(f"compiled for {TARGET.kind}, not run", ("seconds of compiling", "MB of temporaries"), rows, lambda r: (
        f"{r['compile_seconds']:.1f}", f"{r['temporary_bytes'] / 1e6:,.2f}"))
    return rows


def _show(title: str, columns: tuple[str, ...], rows: list[dict], cells) -> None:
    table = Table(title=title)
    for column in ("operator", "shape", "implementation"):
        table.add_column(column)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["op"], row["shape"], row["implementation"], *cells(row))
    Console(highlight=False).print(table)
