"""`longstraw plan` and `longstraw bench step` as commands."""

import json

import pytest

from longstraw_jax.backend import PLUGINS, installed
from longstraw_jax.cli import main
from longstraw_jax.deviceless import Compiled, compiler
from longstraw_jax.planner import plan

TINY = ("--model qwen3.6-tiny --response 32 --group 2 --page 16 --chunk 128 --block 32 --queries 16 --keys 64 --logits 16 "
        "--recurrence 16").split()
compiles = pytest.mark.skipif(not installed(*PLUGINS), reason="XLA's GPU compiler is not installed: pip install 'longstraw-jax[plan]'")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code


@compiles
def test_a_sweep_with_its_plot(tmp_path, capsys):
    out, plot = tmp_path / "plans.json", tmp_path / "plans.png"
    assert run("plan", *TINY, "--mesh", "context=2", "--sweep", "positions=512..1024", "--json", str(out), "--plot", str(plot)) == 0
    assert "1,024" in capsys.readouterr().out and plot.stat().st_size > 10_000
    plans = json.loads(out.read_text())
    assert [row["positions"] for row in plans] == [512, 1024]
    for row in plans:
        assert (row["device"], row["mesh"]) == ("h20-141", {"context": 2, "expert": 1})
        assert (row["gradient"], row["group"]) == ("response", 2)
        assert row["fits"] is True and row["host_bytes"] == {} and row["estimated_seconds"] > 0
        assert row["stages"].keys() == {"capture", "score", "replay", "update"}
        assert all(stage["peak_device_bytes"] > 0 and stage["compile_seconds"] > 0 for stage in row["stages"].values())
        assert row["stages"]["replay"]["flops"] > row["stages"]["score"]["flops"] > 0
        assert row["peak_device_bytes"] == sum(row["device_bytes"].values()) == row["stages"][row["peak_stage"]]["peak_device_bytes"]
    one, two = (row["device_bytes"] for row in plans)
    assert two["pages"] > one["pages"] and one["weights"] == two["weights"]


def test_bench_without_a_gpu_plans(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(plan, "compile_for", lambda *args: Compiled(10, 5, 3, 7, 0, 0.5))
    assert run("bench", "step", *TINY, "--layers", "4", "--positions", "256", "--json", str(out)) == 0
    table = json.loads(out.read_text())
    assert [row["stage"] for row in table] == ["capture", "score", "replay", "update", "step"]
    assert all(row["seconds"] is None and row["compiled_for"] == "NVIDIA H200" and row["planned_bytes"] > 19 for row in table)


@pytest.mark.parametrize(("arguments", "says"), [
    (["--device", "v100"], "device 'v100' is unknown"),
    (["--sweep", "positions=9..3"], "--sweep 'positions=9..3'; wanted one of positions, group, response, mesh"),
    (["--sweep", "colour=3"], "--sweep 'colour=3'; wanted one of"),
    (["--sweep", "positions=64,16", "--response", "32"], "16 positions with a response of 32"),
    (["--sweep", "group=1,2", "--largest"], "--sweep and --largest were both given"),
    (["--plot", "x.png"], "wanted it with --sweep positions=.."),
    (["--model", "qwen9"], "model 'qwen9' is neither a directory nor a known name"),
    (["--mesh", "rows=3"], "'rows=3' is no AXIS=N"),
    (["--compute-efficiency", "2"], "wanted a share of 1"),
    (["--gradient", "full", "--gradient-cosine"], "holds a second cotangent"),
    (["--positions", "8192"], "leave a prompt of 0"),
])
def test_mistakes_get_one_line(arguments, says, capsys):
    assert run("plan", *arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "installed", lambda *modules: False)
    assert run("plan") == 2
    assert "pip install 'longstraw-jax[plan]'" in capsys.readouterr().err
