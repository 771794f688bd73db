"""What a person sees: progress on stderr, tables on stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from longstraw_jax.receipts import Receipt

_UNITS = {"capture": "tokens", "replay": "groups", "score": "groups", "sweep": "tokens", "update": "steps"}


def note(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, style="dim")


@contextlib.contextmanager
def progress(title: str) -> Iterator:
    """A bar per stage on a terminal, nothing elsewhere; yields what `Transaction` calls with (stage, done, total)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"),
               TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"{title} {stage}".strip(), total=total, unit=_UNITS.get(stage, ""))
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def print_receipt(receipt: Receipt) -> None:
    """Stages with their times, bytes per device by part, and the figures of the step."""
    console = Console(highlight=False)
    axes = ", ".join(f"{axis}={size}" for axis, size in receipt.mesh.items())
    stages = Table(title=f"step {receipt.step} of {receipt.model}: {receipt.positions:,} positions, group of {receipt.group}, "
                         f"mesh {axes}, {receipt.gradient} gradient")
    for column in ("stage", "seconds", "compiling", "tokens", "tokens/s", "peak MB per device"):
        stages.add_column(column, justify="left" if column == "stage" else "right")
    for name, stage in receipt.stages.items():
        rate = stage.as_dict()["tokens_per_second"]
        stages.add_row(
            name, f"{stage.seconds:.2f}", f"{stage.compile_seconds:.2f}", f"{stage.tokens:,}" if stage.tokens else "-",
            f"{rate:,.0f}" if rate and stage.tokens else "-",
            megabytes(stage.peak_device_bytes) if stage.peak_device_bytes else "-")
    console.print(stages)
    parts = Table(title="held per device between the stages")
    held = receipt.device_bytes | {f"{name} (host)": size for name, size in receipt.host_bytes.items()}
    for name in held:
        parts.add_column(f"{name} MB", justify="right")
    parts.add_row(*map(megabytes, held.values()))
    console.print(parts)
    moved = "adapter updated" if receipt.updated else "nothing updated (the gradient is exactly 0)"
    console.print(f"loss {receipt.loss:.6g}   gradient norm {receipt.grad_norm:.6g}   {moved}")
    for figures in receipt.metrics:
        shown = "   ".join(f"{name} {value:.6g}" for name, value in figures.items() if isinstance(value, float))
        spread = "   all rewards equal: no advantage" if figures["zero_spread"] else ""
        console.print(f"{figures['group_id'] or 'group'}: {figures['trained_tokens']} trained tokens   {shown}{spread}")


def megabytes(n: int) -> str:
    """10^6 bytes."""
    return f"{n / 1e6:,.2f}"
