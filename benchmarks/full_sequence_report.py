"""The table and the plot of `full_sequence.py`, from its JSON.

    python benchmarks/full_sequence_report.py benchmarks/results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

OURS, FULL = "longstraw_jax, response gradient", "longstraw_jax, full gradient"
PLAIN, CHECKPOINTED = "PyTorch", "PyTorch, gradient checkpointing"
METHODS = (OURS, FULL, PLAIN, CHECKPOINTED)
STYLES = {OURS: {"color": "tab:green", "marker": "o"}, FULL: {"color": "tab:blue", "marker": "o"},
          PLAIN: {"color": "tab:red", "marker": "s"}, CHECKPOINTED: {"color": "tab:orange", "marker": "^"}}
MIB, GIB = 1 << 20, 1 << 30


def markdown(result: dict) -> str:
    rows = result["rows"]
    lines = [*_preamble(result), "",
             "| P | G | method | step, s | | peak, MiB | | compile, s | log-prob difference | gradient difference |",
             "|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|"]
    for r in rows:
        head = f"| {r['prompt']:,} | {r['group']} | {r['method']} | "
        if r["status"] != "measured":
            lines.append(head + f"{r['status']} | | | | | | |")
            continue
        differences = " | ".join(f"{r[key]:.1e}" if key in r else "" for key in ("logprob_difference", "gradient_difference"))
        lines.append(head + f"{r['seconds']:.2f} | {_ratio(r, rows, 'seconds')} | {r['peak_bytes'] / MIB:,.0f} | "
                     f"{_ratio(r, rows, 'peak_bytes')} | {r['compile_seconds']:.0f} | {differences} |")
    lines += ["", "Ours by stage, with the compiler's count of temporary bytes:", "",
              "| P | G | gradient | capture, s | replay, s | sweep, s | update, s | capture, MiB | replay, MiB | sweep, MiB |",
              "|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|"]
    for r in (r for r in rows if "stages" in r):
        seconds = " | ".join(f"{x:.2f}" for x in r["stages"].values())
        temporary = " | ".join(f"{x / MIB:,.0f}" for x in r["temporary_bytes"].values())
        kind = "full" if r["method"] == FULL else "response"
        lines.append(f"| {r['prompt']:,} | {r['group']} | {kind} | {seconds} | {temporary} |")
    return "\n".join([*lines, "", "![time and memory](full_sequence.png)", ""])


def _preamble(result: dict) -> list[str]:
    m, shape = result["machine"], ", ".join(f"{name} {value}" for name, value in result["model"].items())
    packages = ", ".join(f"{name} {m[name]}" for name in ("jax", "torch", "transformers", "peft"))
    return [
        "# One GRPO step on a long prompt, on one CPU device", "",
        f"{m['cpu']}, {m['cores']} cores of which {m['threads']} are used, {m['memory_gib']} GiB; Python {m['python']}, "
        f"{packages}; {m['date']}.", "",
        f"Qwen3.6's layer pattern in float32: {shape}. LoRA rank {result['rank']} on every linear layer of the blocks, "
        f"AdamW, random tokens, {result['rows'][0]['response']} tokens a response.", "",
        "PyTorch: prompt and response of each member under autograd, one member after the other, `sdpa` attention; on a CPU "
        "transformers runs the delta rule in plain PyTorch. Ours: capture, replay, sweep, update. The full gradient is the "
        "conventional one (last columns: the largest difference of a log-probability, and of a matrix's gradient relative to its "
        "norm); the response gradient holds the prompt's state fixed and is another.", "",
        "Seconds: the median of three steps, or one step where it takes more than a minute. Peak: growth of the process's "
        "resident memory during a step. `x`: how many times less than PyTorch."]


def _ratio(row: dict, rows: list[dict], key: str) -> str:
    same = (r for r in rows if r["method"] == PLAIN and (r["prompt"], r["group"]) == (row["prompt"], row["group"]))
    conventional = next(same, {}).get(key)
    return f"{conventional / row[key]:.1f}x" if conventional and row["method"] in (OURS, FULL) else ""


def draw(rows: list[dict], path: Path) -> None:
    """Seconds and peak memory against the prompt's length, a column of panels for each group size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups, prompts = sorted({r["group"] for r in rows}), sorted({r["prompt"] for r in rows})
    figure, axes = plt.subplots(2, len(groups), figsize=(5 * len(groups), 7), sharex=True, sharey="row", squeeze=False)
    for group, (above, below) in zip(groups, axes.T, strict=True):
        for method, style in STYLES.items():
            mine = [r for r in rows if (r["method"], r["group"]) == (method, group)]
            _line(above, mine, "seconds", 1, method, style)
            _line(below, mine, "peak_bytes", MIB, method, style)
            for r in (r for r in mine if "estimated_peak_bytes" in r):
                at = r["prompt"], r["estimated_peak_bytes"] / MIB
                below.plot(*at, color=style["color"], marker="x", markersize=9)
                below.annotate("out of memory", at, (-8, 0), textcoords="offset points", ha="right", color=style["color"])
        above.set_title(f"G = {group}")
        below.set_xlabel("prompt tokens")
    for ax in axes.flat:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(prompts, [f"{p:,}" for p in prompts])
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("seconds a step")
    axes[1, 0].set_ylabel("peak memory of a step, MiB")
    axes[0, 0].legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _line(ax, rows: list[dict], key: str, unit: float, method: str, style: dict) -> None:
    points = [(r["prompt"], r[key] / unit) for r in rows if key in r]
    if points:
        ax.plot(*zip(*points, strict=True), label=method, **style)


def write(result: dict, directory: Path) -> None:
    """full_sequence.md and full_sequence.png."""
    (directory / "full_sequence.md").write_text(markdown(result))
    draw(result["rows"], directory / "full_sequence.png")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1], "full_sequence.json").read_text()), Path(sys.argv[1]))
