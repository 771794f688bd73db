"""How JAX starts: enough threads for devices that wait for each other, and not a word about GPUs where there is no driver.

Imported before anything else of the package, because it must come before JAX's own import.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
"""JAX's CUDA plugins. They also bring XLA's GPU compiler, which needs no GPU."""


def reserve_threads(devices: int) -> None:
    """Sizes the CPU client's thread pool, which devices and the pieces of their operators share.

    By default it has as many threads as cores or devices. When all of them wait, in a collective or for pieces of an operator,
    nothing is left to run what they wait for, and they wait for ever: seen with 8 devices on 2 cores, and with 1. A few more
    cure it; many more only spin: with 32 threads for 4 devices on 2 cores a step takes 20 times as long.
    """
    threads = max((os.cpu_count() or 1) + 2, devices + max(4, devices // 2) if devices > 1 else 0)
    given = os.environ.get("NPROC", "")
    os.environ["NPROC"] = str(max(threads, int(given) if given.isdigit() else 0))  # read when the client starts


def installed(*modules: str) -> bool:
    """Whether any of them is."""
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):  # a package above it
            if importlib.util.find_spec(module) is not None:
                return True
    return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries write to the process's stderr past Python."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _has_driver() -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False


COMPILER_ONLY = installed(*PLUGINS) and not installed("libtpu") and not _has_driver()
"""Whether JAX's CUDA plugin is installed and there is no driver: for its compiler, that is, not for a GPU."""


def shown_devices() -> list:
    """The devices that JAX shows; the first call starts it."""
    with quiet() if COMPILER_ONLY else contextlib.nullcontext():
        return importlib.import_module("jax").devices()


def _start() -> None:
    """Imports JAX; has it run on CPUs where its plugin can only compile.

    By itself it would remark on missing drivers at its import and complain at length when it starts, and the compiler would be
    lost with the GPUs.
    """
    reserve_threads(1)
    if COMPILER_ONLY:
        with quiet():
            jax = importlib.import_module("jax")
        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", "cpu")


_start()
