"""The GPUs that a plan can be made for: what the compiler must know of them, and the rates that times are estimated with.

Sizes are what the driver reports as the device's memory. Rates are the makers' data sheets' (dense bf16, one direction of a
link); a GPU reaches a part of them, see `planner.estimate`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longstraw_jax.errors import InputError


@dataclass(frozen=True)
class Chip:
    name: str
    kind: str
    """As the driver names it."""
    memory: int
    """Bytes."""
    cores: int
    """Streaming multiprocessors."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    clock: float
    """GHz."""
    shared_memory: int
    """Bytes that a block may ask for."""
    l2: int
    """Bytes."""
    flops: float
    """Dense bf16 operations a second."""
    bandwidth: float
    """Bytes a second, of the device's memory."""
    link: float
    """Bytes a second in one direction, between devices of one node."""
    network: float = 50e9
    """Bytes a second in one direction, from a device to those of other nodes: one 400 Gb/s adapter for each."""
    host_link: float = 55e9
    """Bytes a second between the device and its host's memory."""
    node: int = 8
    """Devices of one node."""
    pallas_kind: str = "NVIDIA H200"
    """A GPU that Pallas has heard of and that runs the same machine code."""

    def target(self) -> str:
        """XLA's description of the chip (a text `GpuTargetConfigProto`). A field too few ends the process, without an error."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory + 1024}
  shared_memory_per_block_optin: {self.shared_memory}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.bandwidth)}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{self.pallas_kind}"
"""


_HOPPER = Chip(
    "h200", "NVIDIA H200", memory=150_754_820_096, cores=132, capability=(9, 0), clock=1.98, shared_memory=232_448, l2=62_914_560,
    flops=989e12, bandwidth=4.8e12, link=450e9)

CHIPS = {chip.name: chip for chip in (
    _HOPPER,
    replace(_HOPPER, name="h100", kind="NVIDIA H100 80GB HBM3", memory=85_015_134_208, l2=52_428_800, bandwidth=3.35e12),
    replace(_HOPPER, name="h20-141", kind="NVIDIA H20", cores=78, flops=148e12),
    replace(_HOPPER, name="h20-96", kind="NVIDIA H20", memory=102_085_492_736, cores=78, flops=148e12, bandwidth=4.0e12),
    Chip("a100-80", "NVIDIA A100-SXM4-80GB", memory=85_098_233_856, cores=108, capability=(8, 0), clock=1.41, shared_memory=166_912,
         l2=41_943_040, flops=312e12, bandwidth=2.04e12, link=300e9, network=25e9, host_link=25e9, pallas_kind="NVIDIA A100-SXM4-80GB"),
    Chip("b200", "NVIDIA B200", memory=191_503_466_496, cores=148, capability=(10, 0), clock=1.97, shared_memory=232_448,
         l2=132_644_864, flops=2250e12, bandwidth=8.0e12, link=900e9, pallas_kind="NVIDIA B200"),
)}


def named_chip(name: str, memory_gb: float | None = None) -> Chip:
    """A chip by name (`h20`: the one with 141 GB), with another memory where given, in 10^9 bytes. Raises InputError."""
    chip = CHIPS.get({"h20": "h20-141"}.get(name, name))
    if chip is None:
        raise InputError(f"device {name!r} is unknown; wanted one of {', '.join(sorted(CHIPS))}, with --memory-gb for another memory")
    if memory_gb is None:
        return chip
    if not 1 <= memory_gb < 100_000:
        raise InputError(f"a device memory of {memory_gb} GB; wanted 10^9 bytes as a number from 1 on")
    return replace(chip, memory=int(memory_gb * 1e9))
