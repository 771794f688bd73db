"""The device mesh: axes `context` and `expert`, and fake CPU devices to try layouts without hardware.

Tokens are sharded over both axes, so the context-parallel degree is context x expert; experts are sharded over `expert`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from longstraw_jax.backend import reserve_threads, shown_devices
from longstraw_jax.errors import InputError

AXES = ("context", "expert")

AnyMesh = Mesh | AbstractMesh
"""Devices at hand, or such as programs are only compiled for."""


def offer_cpu_devices(count: int) -> None:
    """Has JAX show `count` CPU devices where it finds no accelerator. No effect once JAX has started."""
    reserve_threads(count)
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", count)


def fake_cpu_devices(count: int) -> None:
    """Makes JAX show `count` CPU devices and no others. Call it before anything asks JAX for a device.

    Raises InputError where JAX has already started with other devices.
    """
    if count < 1:
        raise InputError(f"{count} fake CPU devices asked for; wanted at least 1")
    offer_cpu_devices(count)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
    if len(shown_devices()) != count or jax.default_backend() != "cpu":
        raise InputError(f"JAX already runs with {jax.device_count()} {jax.default_backend()} devices, {count} fake CPU devices "
                         "were asked for; ask before the first JAX computation of the process")


def make_mesh(context: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of context x expert devices (default: the first ones JAX shows). Raises InputError if there are too few."""
    if context < 1 or expert < 1:
        raise InputError(f"mesh context={context},expert={expert}; wanted whole numbers >= 1")
    devices = shown_devices() if devices is None else list(devices)
    if len(devices) < context * expert:
        raise InputError(f"mesh context={context},expert={expert} needs {context * expert} devices and there are {len(devices)} "
                         f"({devices[0].platform}); use a smaller mesh, or fake_cpu_devices({context * expert}) before JAX starts")
    grid = np.asarray(devices[: context * expert], dtype=object).reshape(context, expert)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def platform_of(mesh: AnyMesh) -> str:
    """What the mesh's devices are, `cpu` or `gpu` for example; of devices that are not at hand, too, where the mesh says it."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return mesh.abstract_device.platform if mesh.abstract_device else jax.default_backend()


def parse_mesh(text: str) -> dict[str, int]:
    """`context=8` or `context=2,expert=4` -> {"context": 2, "expert": 4}. Axes left out are 1."""
    degrees = dict.fromkeys(AXES, 1)
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in AXES or not value.isdigit() or int(value) < 1:
            raise InputError(f"mesh {text!r}: {part!r} is no AXIS=N; wanted for example context=8 or context=2,expert=4")
        degrees[name] = int(value)
    return degrees
