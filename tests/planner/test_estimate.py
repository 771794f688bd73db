"""From work to seconds, by hand."""

import pytest

from longstraw_jax.deviceless import CHIPS, named_chip
from longstraw_jax.errors import InputError
from longstraw_jax.planner.estimate import Efficiency, estimate, rate

H20, WHOLE = CHIPS["h20-141"], Efficiency(1, 1, 1)
EIGHT, MANY = {"context": 8, "expert": 1}, {"context": 4, "expert": 8}


def test_compute_and_memory_overlap_and_exchanges_do_not():
    e = estimate(148e12, 2.4e12, {("all_gather", ("context",)): 450e9}, 55e9, H20, EIGHT, WHOLE)
    assert (e.compute, e.memory, e.links, e.host) == pytest.approx((1, 0.5, 1, 1))
    assert e.seconds == pytest.approx(3)
    half = estimate(148e12, 2.4e12, {}, 0, H20, EIGHT, Efficiency(0.25, 0.1, 1))
    assert (half.seconds, half.bound) == (pytest.approx(5), "memory")


@pytest.mark.parametrize(("kind", "axes", "mesh", "wanted"), [
    ("all_gather", ("context", "expert"), EIGHT, 450e9),  # one node
    ("all_to_all", ("expert",), MANY, 450e9),  # a row of eight lies in one node
    ("all_gather", ("context", "expert"), MANY, 400e9),  # all eight adapters of a node at once
    ("all_gather", ("context",), MANY, 50e9),  # one device of each node
    ("all_to_all", ("context", "expert"), MANY, 1 / (24 / 31 / 50e9 + 7 / 31 / 450e9)),
])
def test_rates_follow_where_the_peers_are(kind, axes, mesh, wanted):
    assert rate(kind, axes, H20, mesh) == pytest.approx(wanted)


def test_chips():
    assert named_chip("h20") is named_chip("h20-141")
    assert named_chip("h20-141").memory == 150_754_820_096
    assert named_chip("h100", memory_gb=94).memory == 94_000_000_000
    with pytest.raises(InputError, match="device 'v100' is unknown; wanted one of a100-80, b200, "):
        named_chip("v100")
    with pytest.raises(InputError, match="device memory of 0 GB"):
        named_chip("h100", memory_gb=0)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_target_names_every_field_that_the_compiler_needs(chip):
    """One that is missing ends the process with a division by zero."""
    for name in ("threads_per_block_limit", "threads_per_warp", "core_count", "fpus_per_core", "memory_bandwidth", "l2_cache_size",
                 "clock_rate_ghz", "device_memory_size", "cuda_compute_capability", "registers_per_core_limit"):
        assert f"{name}" in chip.target()
