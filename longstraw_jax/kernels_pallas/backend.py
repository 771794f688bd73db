"""The Pallas backend that the kernels are compiled by, if this JAX has it."""

from __future__ import annotations

try:
    from jax.experimental.pallas import triton as triton
except ImportError:  # its removal is announced
    triton = None

MISSING = "this JAX has no Triton backend for Pallas" if triton is None else None
"""Why no kernel can run; None if they can."""
