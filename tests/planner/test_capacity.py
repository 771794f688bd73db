"""The published size for 8 H20s, compiled: what the committed figures say still holds."""

import json
from pathlib import Path

import pytest

from longstraw_jax.backend import PLUGINS, installed
from longstraw_jax.deviceless import named_chip
from longstraw_jax.models.registry import named_spec
from longstraw_jax.planner.plan import Plan, make_plan
from longstraw_jax.planner.stages import Workload

COMMITTED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "capacity.json").read_text())
SLACK = 1.02

pytestmark = pytest.mark.skipif(not installed(*PLUGINS), reason="XLA's GPU compiler is not installed: pip install 'longstraw-jax[plan]'")


def replay(positions: int, group: int) -> Plan:
    workload = Workload(named_spec("qwen3.6-27b"), positions, 8_192, group, weights="nf4")
    return make_plan("qwen3.6-27b", workload, named_chip("h20"), {"context": 8, "expert": 1}, only="replay")


def test_two_million_positions_whatever_the_group():
    two, eight = (replay(2_097_152, group).peak_device_bytes for group in (2, 8))
    assert abs(two - eight) <= 0.001 * two
    assert eight <= 26e9
    assert eight <= SLACK * COMMITTED["qwen 2M, G=8"]["peak_device_bytes"]


def test_four_and_a_half_million_positions_with_adapters():
    plan = replay(4_456_448, 8)
    assert plan.peak_device_bytes <= 46e9
    assert plan.peak_device_bytes <= SLACK * COMMITTED["qwen 4.46M"]["peak_device_bytes"]
    parts = plan.device_bytes()
    assert sum(parts.values()) == plan.peak_device_bytes
    # by hand: 65,536 bytes a position and 64 layers' adapters, whose moments are two more copies
    assert parts["pages"] == pytest.approx(4_448_256 * 65_536 / 8, rel=0.004)
    assert parts["trainable"] == 116_727_808 * 4 and parts["optimizer"] == pytest.approx(2 * parts["trainable"], rel=1e-6)
    assert plan.fits and plan.stages["replay"].cost.flops > 0 and not plan.host_bytes()


def test_sixteen_million_positions_fit():
    assert replay(16_777_216, 8).fits


def test_committed_figures_are_within_the_aims():
    aims = {"qwen 2M, G=2": 26e9, "qwen 2M, G=8": 26e9, "qwen 4.46M": 46e9, "qwen full 2M": 62e9, "glm 2M": 60e9, "glm full 2M": 72e9}
    positions = {"qwen largest": 16_777_216, "qwen full largest": 5_500_000, "one H200, device": 1_800_000,
                 "one H200, host": 4_456_448, "glm largest": 28_000_000}
    assert aims.keys() | positions.keys() == COMMITTED.keys()
    for name, row in COMMITTED.items():
        assert row["fits"] and row["command"].startswith("longstraw plan ")
        assert row["peak_device_bytes"] <= aims.get(name, row["device_memory_bytes"] - row["reserve_bytes"]), name
        assert row["positions"] >= positions.get(name, 0), name
