"""Which implementation of an operator runs: the one asked for by name, one for a whole region, or the first that fits.

Every operator has `xla`, plain `jax.numpy`, and one kernel: `pallas`, written here, or `cudnn`, a library's. A Pallas kernel is
compiled for NVIDIA GPUs and interpreted everywhere else. Where a program will run is known when it is lowered, not when it is
traced: the same trace may be compiled for the CPU here and for a GPU that is not here. So the platform's part of that choice is
left to `lax.platform_dependent`. A library's kernel asks for the GPU when it is traced, and `at_hand` says whether there is one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, get_args

import jax
from jax import lax
from jax.sharding import Mesh

from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.kernels_pallas.backend import MISSING
from longstraw_jax.sharding import AnyMesh, platform_of

Implementation = Literal["auto", "xla", "pallas", "cudnn"]
"""`auto`: an operator's kernel on NVIDIA GPUs if it supports the inputs, XLA otherwise. A kernel's name: that kernel or an error."""

_REGION: ContextVar[Implementation] = ContextVar("implementation", default="auto")
_AT_HAND: ContextVar[str | None] = ContextVar("at_hand", default=None)


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Inside, operators that are called with "auto" run `name`: for a whole model without threading an argument through it.

    An operator whose kernel has another name stays at "auto". The region is read when a program is traced. The engine's programs
    are kept apart by it; a jitted function of your own that was traced before keeps what it was traced with.
    """
    token = _REGION.set(_known(name))
    try:
        yield
    finally:
        _REGION.reset(token)


def region() -> Implementation:
    """What the region asks for; "auto" outside of any."""
    return _REGION.get()


@contextlib.contextmanager
def traced_for(mesh: AnyMesh) -> Iterator[None]:
    """Inside, what is traced will run on `mesh`; or is only compiled for it, where this process does not have its devices."""
    here = isinstance(mesh, Mesh) and mesh.devices.flat[0] in jax.devices()
    token = _AT_HAND.set(platform_of(mesh) if here else "none")
    try:
        yield
    finally:
        _AT_HAND.reset(token)


def at_hand() -> str:
    """The platform of the devices that what is traced will run on, if this process has them; "none" if not."""
    return _AT_HAND.get() or jax.default_backend()


def choose(
    operator: str, asked: str, refusal: str | None, fault: Callable[[], str | None], kernel: Implementation = "pallas"
) -> Implementation:
    """`xla`, `kernel`, or `auto` where the platform decides between the two.

    Args:
      refusal: why the kernel cannot take these inputs; None if it can.
      fault: what is wrong with the kernel on the GPU at hand; asked only where there is one and the kernel would run.
      kernel: the name of the operator's kernel.

    Raises UnsupportedError if the kernel was asked for by name and refuses, or one that the operator does not have; InputError
    for a name that is none.
    """
    if _known(asked) not in ("auto", "xla", kernel):
        raise UnsupportedError(f"{operator} has no implementation {asked!r}; wanted auto, xla or {kernel}")
    refusal = (MISSING if kernel == "pallas" else None) or refusal
    wanted = region() if asked == "auto" and region() in ("xla", kernel) else asked
    if wanted != "xla" and not refusal and at_hand() == "gpu":
        refusal = fault()
    if wanted == kernel and refusal:
        raise UnsupportedError(f"{operator} by its kernel {kernel!r}: {refusal}; or ask for implementation 'xla' or 'auto'")
    return "xla" if refusal else wanted


def by_platform(choice: Implementation, kernel: Callable, xla: Callable, *args):
    """`kernel(*args, interpret=...)` or `xla(*args)`, for a `choice` that is not `xla`."""
    elsewhere = xla if choice == "auto" else functools.partial(kernel, interpret=True)
    return lax.platform_dependent(*args, cuda=functools.partial(kernel, interpret=False), default=elsewhere)


def _known(name: str) -> Implementation:
    if name not in get_args(Implementation):
        raise InputError(f"implementation is {name!r}; wanted one of {', '.join(get_args(Implementation))}")
    return name
