"""Before a GPU at hand runs a kernel in earnest: a small call of it, compared with the plain formula.

A kernel that was compiled for GPUs elsewhere, or a library's function that nobody promises to keep, may fail on this GPU, this
driver, this version of JAX. Better to know before the first program than to train on its numbers.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from longstraw_jax.errors import UnsupportedError


@functools.cache
def fault(operator: str, compare: Callable[..., str | None], *sizes) -> str | None:
    """What is wrong with the operator's kernel on the GPU at hand; None if nothing is.

    Args:
      compare: of `sizes`, says how far the kernel is from the formula, None where it is near enough. What it raises is a fault
        like any other.

    It runs once for each `sizes`, when the first program that has them is traced. Where it finds something one warning says so;
    among several processes that is an error, since the others would compile another program and wait for this one for ever.
    """
    with ThreadPoolExecutor(1) as apart:  # in this thread a trace is going on, and would take the comparison in
        found = apart.submit(_said, compare, sizes).result()
    if found and jax.process_count() > 1:
        raise UnsupportedError(f"{operator}: the kernel {found} in process {jax.process_index()}; ask for implementation 'xla' everywhere")
    if found:
        warnings.warn(f"{operator} runs as XLA, which is slower: the kernel {found}", RuntimeWarning, stacklevel=2)
    return found


def _said(compare, sizes) -> str | None:
    try:
        with jax.default_matmul_precision("highest"):
            return compare(*sizes)
    except Exception as error:  # whatever it is: no such kernel for this GPU, a function that has moved
        return f"fails: {type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def differs(given, wanted, allowed: float) -> str | None:
    """How far arrays are from the wanted ones, the largest of which counts as 1; None if no further than allowed. NaN is far."""
    # NumPy's maximum is NaN where a number is; XLA's on a CPU need not be
    far = [np.abs(np.asarray(x - y)).max() / np.abs(np.asarray(y)).max() for x, y in zip(given, wanted, strict=True)]
    return None if all(x <= allowed for x in far) else f"differs from the plain formula by {', '.join(f'{x:.2g}' for x in far)}"
