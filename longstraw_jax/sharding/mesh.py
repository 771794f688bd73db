"""The device mesh: axes `context` and `expert`, and fake CPU devices to try layouts without hardware.

Tokens are sharded over both axes, so the context-parallel degree is context x expert; experts are sharded over `expert`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from longstraw_jax.errors import InputError

AXES = ("context", "expert")

# The CPU client sizes its thread pool by the machine's cores. With more fake devices than cores, a loop with several
# collectives then waits for ever for a thread; this many threads have never been seen to.
_CPU_CLIENT_THREADS = 32


def fake_cpu_devices(count: int) -> None:
    """Makes JAX show `count` CPU devices. Call it before anything asks JAX for a device.

    Raises InputError where JAX has already started with another number of CPU devices.
    """
    if count < 1:
        raise InputError(f"{count} fake CPU devices asked for; wanted at least 1")
    os.environ.setdefault("NPROC", str(max(_CPU_CLIENT_THREADS, 4 * count)))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started: the count below tells whether that matters
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise InputError(f"JAX already runs with {jax.device_count()} {jax.default_backend()} devices, {count} fake CPU devices "
                         "were asked for; ask before the first JAX computation of the process")


def make_mesh(context: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of context x expert devices (default: the first ones JAX shows). Raises InputError if there are too few."""
    if context < 1 or expert < 1:
        raise InputError(f"mesh context={context},expert={expert}; wanted whole numbers >= 1")
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < context * expert:
        raise InputError(f"mesh context={context},expert={expert} needs {context * expert} devices and there are {len(devices)} "
                         f"({devices[0].platform}); use a smaller mesh, or fake_cpu_devices({context * expert}) before JAX starts")
    grid = np.asarray(devices[: context * expert], dtype=object).reshape(context, expert)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def parse_mesh(text: str) -> dict[str, int]:
    """`context=8` or `context=2,expert=4` -> {"context": 2, "expert": 4}. Axes left out are 1."""
    degrees = dict.fromkeys(AXES, 1)
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in AXES or not value.isdigit() or int(value) < 1:
            raise InputError(f"mesh {text!r}: {part!r} is no AXIS=N; wanted for example context=8 or context=2,expert=4")
        degrees[name] = int(value)
    return degrees
