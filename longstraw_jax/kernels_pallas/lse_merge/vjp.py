"""The derivative of the kernels' lse_merge: cotangents of the output and of the LSE both count."""

from __future__ import annotations

import functools

import jax

from longstraw_jax.kernels_pallas.dispatch import Implementation, by_platform
from longstraw_jax.kernels_pallas.lse_merge.kernel import merge, pull_merge
from longstraw_jax.kernels_pallas.lse_merge.reference import lse_merge_reference, pull_reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable_merge(choice: Implementation, partials: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`merge` where the kernel runs and the reference elsewhere.

    The rule stands around the choice: differentiating a choice would have each branch return the other's residuals as zeros.
    """
    return by_platform(choice, merge, lse_merge_reference, partials, lse)


def _forward(choice, partials, lse):
    out, merged = differentiable_merge(choice, partials, lse)
    return (out, merged), (partials, lse, out, merged)


def _backward(choice, residuals, cotangents):
    return by_platform(choice, pull_merge, pull_reference, *residuals, *cotangents)


differentiable_merge.defvjp(_forward, _backward)
