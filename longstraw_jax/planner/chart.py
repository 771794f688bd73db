"""Bytes per device against positions, the device's ceiling, and published points on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longstraw_jax.errors import UnsupportedError


def draw(path: Path, plans: Sequence[dict], title: str, published: Sequence[tuple[int, float]] = ()) -> None:
    """Writes a picture (by the file's ending) of plans as `Plan.as_dict` gives them, and of (positions, 10^9 bytes per device) that
    LongStraw (2026) reports. Raises UnsupportedError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(f"drawing {path} needs matplotlib, which is not installed: pip install 'longstraw-jax[plot]'") from None
    figure = Figure((7, 4.2), layout="constrained")
    axes = figure.subplots()
    positions = [plan["positions"] for plan in plans]
    parts = list(dict.fromkeys(name for plan in plans for name in plan["device_bytes"]))
    axes.stackplot(positions, *([plan["device_bytes"].get(name, 0) / 1e9 for plan in plans] for name in parts), labels=parts, alpha=0.8)
    ceiling = plans[0]["device_memory_bytes"] / 1e9
    axes.axhline(ceiling, color="black", linewidth=1)
    axes.annotate(f"{plans[0]['device']}: {ceiling:.1f} GB", (positions[0], ceiling), xytext=(2, 3), textcoords="offset points")
    if published:
        axes.plot(*zip(*published, strict=True), "kx", label="LongStraw (2026)")
    axes.set(xlabel="positions", ylabel="GB per device at the peak", title=title, xscale="log", ylim=(0, ceiling * 1.12))
    axes.legend(loc="upper left", fontsize=8, ncols=2, bbox_to_anchor=(0, 0.92))
    figure.savefig(path, dpi=130)
