"""XLA's GPU compiler without a GPU: abstract arguments in, the real executable's bytes out.

Arguments are traced on an `AbstractMesh`. On a mesh of the topology's own devices, which have no memories, a placement in the
host's memory would silently be dropped, and its bytes would count as the device's (jax 0.10 to 0.12).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from longstraw_jax.backend import PLUGINS, installed, quiet, shown_devices
from longstraw_jax.deviceless.chips import CHIPS, Chip
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.sharding import AXES

TARGET = CHIPS["h200"]
"""What is compiled for where nobody asks for a chip. All Hopper GPUs (H20, H100, H200) run the same machine code, sm_90a."""

REMEDY = "pip install 'longstraw-jax[plan]'"

# Untuned Triton products, all that can be had without a device, fail on small ones ("Couldn't find output tile sizes"), compile
# longer and need more room than cuBLAS's.
# The optimisation level as it is by default: machine code that is not optimised takes ptxas ten times as long.
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_backend_optimization_level": 3}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program on one device, in bytes."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that take the place of donated arguments."""
    temporaries: int
    host_temporaries: int
    seconds: float
    """Spent compiling."""

    @property
    def device_bytes(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


def abstract_mesh(chip: Chip, context: int = 1, expert: int = 1) -> AbstractMesh:
    """A mesh of chips that nobody has."""
    shown_devices()  # JAX starts, before a trace does it and lets the plugin remark that there are no drivers
    device = AbstractDevice(device_kind=chip.pallas_kind, num_cores=chip.cores, platform="gpu")
    return AbstractMesh((context, expert), AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device)


def executable_for(chip: Chip, count: int, jitted: Any, arguments: tuple) -> jax.stages.Compiled:
    """Compiles `jitted` for `count` chips from abstract arguments, every one with a placement that names its memory.

    Raises UnsupportedError where the compiler's packages are missing.
    """
    there = devices(chip, count)
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    with jax.sharding.use_abstract_mesh(mesh):  # where Pallas, since JAX 0.11, looks for the device
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    lowered._lowering.compile_args["backend"] = there[0].client  # no public way: the CPU's client would be taken
    with quiet():  # that sorts are not tuned without a device, and the like; faults are exceptions
        return lowered.compile(device_assignment=tuple(there), compiler_options=OPTIONS)


def compile_alone(f: Callable, *arguments: jax.ShapeDtypeStruct, chip: Chip = TARGET) -> jax.stages.Compiled:
    """`f` for one chip, for arguments of these shapes. Raises UnsupportedError where the compiler's packages are missing."""
    placed = NamedSharding(abstract_mesh(chip), PartitionSpec(), memory_kind="device")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in arguments]
    return executable_for(chip, 1, jax.jit(f), tuple(shapes))


def compile_for(chip: Chip, count: int, jitted: Any, arguments: tuple) -> Compiled:
    """What the compiler says of `executable_for` these."""
    begun = time.perf_counter()
    m = executable_for(chip, count, jitted, arguments).memory_analysis()
    return Compiled(
        m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes, m.host_temp_size_in_bytes,
        time.perf_counter() - begun)


def devices(chip: Chip, count: int) -> list[jax.Device]:
    """So many chips that nobody has, node by node. Raises UnsupportedError where the compiler's packages are missing."""
    require_compiler()
    within = min(count, chip.node)
    with quiet():
        shape = f"1x{-(-count // within)}x{within}"
        try:
            described = topologies.get_topology_desc(chip.name, "cuda", target_config=chip.target(), topology=shape)
        except NotImplementedError:  # JAX was started before this package and has given the plugin up
            raise UnsupportedError("JAX's CUDA plugin failed to start, probably for want of a driver; set JAX_PLATFORMS=cpu, with which "
                                   "it compiles without one") from None
    return described.devices[:count]


def require_compiler() -> None:
    """Raises UnsupportedError, saying what to install, where XLA's GPU compiler or the assembler behind it is missing."""
    if not installed(*PLUGINS):
        raise UnsupportedError(f"planning compiles with JAX's CUDA plugin, which is not installed; wanted its packages: {REMEDY}")
    if not installed("nvidia.cuda_nvcc", "nvidia.cu13") and shutil.which("ptxas") is None:
        raise UnsupportedError(f"planning needs ptxas, from NVIDIA's nvcc package, which is not installed; wanted it: {REMEDY}")
