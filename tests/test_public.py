"""The public surface, and the commands that need nothing prepared."""

import json

import pytest

import longstraw_jax
from longstraw_jax.cli import main
from longstraw_jax.cli.verify import exit_code

NAMES = {
    "BlockSizes", "GradientConfig", "Group", "InputError", "LongstrawError", "LoraConfig", "ObjectiveConfig",
    "OptimizerConfig", "Policy", "Replay", "ResidentState", "Response", "Transaction", "UnsupportedError", "capture",
    "fake_cpu_devices", "init_optimizer", "load_policy", "load_tokenizer", "make_mesh", "read_groups", "replay",
    "save_adapter", "score", "sweep", "update",
}


def test_public_names():
    assert NAMES <= set(vars(longstraw_jax))
    classes_and_functions = {name for name, x in vars(longstraw_jax).items() if callable(x) and not name.startswith("_")}
    assert classes_and_functions == NAMES


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code


def test_demo_writes_what_programs_rely_on(tmp_path, capsys):
    path = tmp_path / "receipt.json"
    assert run("demo", "--model", "glm5.2-tiny", "--mesh", "context=2", "--prompt-length", 300, "--response-length", 9, "--group", 2,
               "--steps", 2, "--chunk", 128, "--memory", "host", "--json", path) == 0
    receipt = json.loads(path.read_text())
    assert {"model", "positions", "group", "mesh", "gradient", "loss", "grad_norm", "stages", "peak_device_bytes"} <= receipt.keys()
    assert receipt["positions"] == 309
    assert receipt["step"] == 2
    assert all(stage["seconds"] > 0 for stage in receipt["stages"].values())
    assert all(receipt["steps"][0]["stages"][name]["compile_seconds"] > 0 for name in ("capture", "replay"))
    first, second = receipt["steps"]
    assert first["metrics"][0]["ratio_max"] == 1.0
    assert second["metrics"][0]["ratio_max"] != 1.0
    assert "adapter updated" in capsys.readouterr().out


def test_verify_passes_and_can_fail(tmp_path, capsys):
    path = tmp_path / "levels.json"
    options = ("verify", "--mesh", "context=2", "--dtype", "float32", "--prompt-length", 60, "--response-length", 20, "--json", path)
    assert run(*options) == 0
    levels = json.loads(path.read_text())["levels"]
    assert {number: level["status"] for number, level in levels.items()} == {"1": "pass", "2": "pass", "3": "pass", "4": "pass"}
    assert 0 < max(levels["2"]["max_logprob_difference"].values()) < 2e-4
    assert "response operators" in capsys.readouterr().out
    levels["2"]["status"] = "fail"
    assert exit_code({"levels": levels}) == 1
