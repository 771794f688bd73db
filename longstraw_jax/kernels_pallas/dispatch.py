"""Which implementation of an operator runs: the one asked for by name, one for a whole region, or the first that fits.

Every operator has `xla`, plain `jax.numpy`, and `pallas`, its kernel. A kernel is compiled for NVIDIA GPUs and interpreted
everywhere else. Where a program will run is known when it is lowered, not when it is traced: the same trace may be compiled for
the CPU here and for a GPU that is not here. So the platform's part of the choice is left to `lax.platform_dependent`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, get_args

from jax import lax

from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.kernels_pallas.backend import MISSING

Implementation = Literal["auto", "xla", "pallas"]
"""`auto`: the kernel on NVIDIA GPUs if it supports the inputs, XLA otherwise. `pallas`: the kernel or an error."""

_REGION: ContextVar[Implementation] = ContextVar("implementation", default="auto")


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Inside, operators that are called with "auto" run `name`: for a whole model without threading an argument through it.

    It is read when a program is traced. The engine's programs are kept apart by it; a jitted function of your own that was
    traced before keeps what it was traced with.
    """
    token = _REGION.set(_known(name))
    try:
        yield
    finally:
        _REGION.reset(token)


def region() -> Implementation:
    """What the region asks for; "auto" outside of any."""
    return _REGION.get()


def choose(operator: str, asked: str, refusal: str | None) -> Implementation:
    """`xla`, `pallas`, or `auto` where the platform decides between the two.

    Args:
      refusal: why the kernel cannot take these inputs; None if it can.

    Raises UnsupportedError if the kernel was asked for by name and refuses, InputError for a name that is none.
    """
    refusal = MISSING or refusal
    wanted = region() if _known(asked) == "auto" else asked
    if wanted == "pallas" and refusal:
        raise UnsupportedError(f"{operator} as a Pallas kernel: {refusal}; or ask for implementation 'xla' or 'auto'")
    return "xla" if refusal else wanted


def by_platform(choice: Implementation, kernel: Callable, xla: Callable, *args):
    """`kernel(*args, interpret=...)` or `xla(*args)`, for a `choice` that is not `xla`."""
    elsewhere = xla if choice == "auto" else functools.partial(kernel, interpret=True)
    return lax.platform_dependent(*args, cuda=functools.partial(kernel, interpret=False), default=elsewhere)


def _known(name: str) -> Implementation:
    if name not in get_args(Implementation):
        raise InputError(f"implementation is {name!r}; wanted one of {', '.join(get_args(Implementation))}")
    return name
