"""`longstraw bench kernels`: rows that programs rely on, whether there is a GPU, a compiler, or neither."""

import json

import pytest

from longstraw_jax import deviceless
from longstraw_jax.cli import main
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas import bench
from longstraw_jax.kernels_pallas.dense_attention.shapes import AttentionShape
from longstraw_jax.kernels_pallas.dsa_select.shapes import SelectShape
from longstraw_jax.kernels_pallas.lse_merge.shapes import MergeShape

KEYS = {"op", "shape", "implementation", "device", "seconds", "compiled_for", "bytes", "flops"}
MERGE = MergeShape(owners=3, tokens=2, heads=5, width=7)


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code


def test_compiled_rows(tmp_path, capsys):
    try:
        deviceless.require_compiler()
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    path = tmp_path / "rows.json"
    assert run("bench", "kernels", "--shapes", "latent_64_owners_one_token", "--json", path) == 0
    rows = json.loads(path.read_text())
    assert [(r["op"], r["implementation"]) for r in rows] == [
        (op, name) for op in ("lse_merge", "lse_merge_and_pull") for name in ("pallas", "xla")]
    assert all(r.keys() >= KEYS and r["seconds"] is None and r["compiled_for"] == "NVIDIA H200" for r in rows)
    said = capsys.readouterr()
    assert "not run" in said.out and "no GPU here" in said.err


def test_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(deviceless.compiler, "installed", lambda *modules: False)
    assert run("bench", "kernels", "--json", tmp_path / "rows.json") == 2
    assert "pip install 'longstraw-jax[plan]'" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()


def test_no_such_shape(capsys):
    assert run("bench", "kernels", "--shapes", "latent_32_owners,small") == 2
    assert "wanted some of grouped_query_8_owners, latent_32_owners" in capsys.readouterr().err


def test_timed_rows():
    """On the CPU, where the kernels are interpreted: the figures mean nothing here, how they come about does."""
    rates = bench.Rates(copy=1e9, matmul=1e12)
    shape = SelectShape(queries=2, keys=40, heads=2, width=16, k=3)
    attention = AttentionShape(queries=2, keys=40, heads=4, kv=2, width=16)
    for subject in (bench.Subject("lse_merge_and_pull", "tiny", bench._merge_and_pull, MERGE.abstract() + MERGE.cotangents(), 1000, 2000),
                    bench.Subject("dsa_select", "tiny", bench._selection(shape), shape.abstract(), shape.bytes, shape.flops),
                    bench.Subject("dense_attention", "tiny", bench.dense_attention, attention.abstract(), 1000, 2000, kernel="cudnn")):
        rows = list(bench.timed_rows(subject, rates))
        assert [r["implementation"] for r in rows] == [subject.kernel, "xla"]
        for row in rows:
            assert row.keys() >= KEYS and row["seconds"] > 0 and row["compiled_for"] is None
            assert row["copy_share"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
            assert row["matmul_share"] == pytest.approx(row["flops"] / row["seconds"] / 1e12)
            assert row["max_difference"] < 1e-5


def test_a_kernel_that_refuses_says_so():
    wide = MergeShape(owners=2, tokens=1, heads=1, width=5000)
    subject = bench.Subject("lse_merge", "wide", bench.lse_merge, wide.abstract(), wide.bytes, wide.flops)
    refused, timed = bench.timed_rows(subject, bench.Rates(1e9, 1e12))
    assert refused["seconds"] is None and "wanted at most 4096" in refused["refused"]
    assert timed["seconds"] > 0


def test_counts_of_bytes_and_flops():
    numbers, rows = 3 * 2 * 5 * 7, 2 * 5
    assert MERGE.bytes == 4 * (numbers + 3 * rows + rows * 7 + rows)
    assert MERGE.pull_bytes == 4 * (2 * numbers + 2 * 3 * rows + 2 * rows * 7 + 2 * rows)
    assert MERGE.flops == 2 * numbers and MERGE.pull_flops == 3 * numbers
    shape = SelectShape(queries=2, keys=40, heads=3, width=16, k=5)
    assert shape.bytes == 2 * (2 * 3 * 16 + 2 * 3 + 40 * 16) + 2 * 2 * 5 * 8
    assert shape.flops == 2 * 40 * 3 * (2 * 16 + 2)
    attention = AttentionShape(queries=2, keys=40, heads=6, kv=3, width=16)
    assert attention.bytes == 2 * (2 * 2 * 6 * 16 + 2 * 40 * 3 * 16) + 4 * 2 * 6
    assert attention.flops == 2 * (2 * 2 * 6 * 40 * 16)


def test_rates_are_measured():
    rates = bench.Rates.measured(numbers=2**12, side=32)
    assert rates.copy > 0 and rates.matmul > 0
