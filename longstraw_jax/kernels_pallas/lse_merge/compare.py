"""lse_merge's kernels against its reference, on the machine at hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.kernels_pallas.check import differs
from longstraw_jax.kernels_pallas.lse_merge.kernel import merge, pull_merge
from longstraw_jax.kernels_pallas.lse_merge.reference import lse_merge_reference, pull_reference

_TOKENS, _HEADS = 5, 3


def compare(n: int, width: int, dtype: str, lse_dtype: str, interpret: bool = False) -> str | None:
    """How far the kernels are, there and back, with n partials of which one is empty; None if no more than rounding."""
    rng, rows = np.random.default_rng(0), (_TOKENS, _HEADS)
    partials, lse = rng.standard_normal((n, *rows, width)), rng.standard_normal((n, *rows))
    lse[: n - 1 and 1] = -np.inf
    given = jnp.asarray(partials, dtype), jnp.asarray(lse, lse_dtype)
    bars = jnp.float32(rng.standard_normal((*rows, width))), jnp.float32(rng.standard_normal(rows))

    def there_and_back(merge, pull):
        def f(partials, lse, *bars):
            results = merge(partials, lse)
            return *results, *pull(partials, lse, *results, *bars)

        return jax.jit(f)(*given, *bars)

    kernels = (functools.partial(f, interpret=interpret) for f in (merge, pull_merge))
    allowed = max(1e-5, *(4 * float(jnp.finfo(x).eps) for x in (dtype, lse_dtype)))
    return differs(there_and_back(*kernels), there_and_back(lse_merge_reference, pull_reference), allowed)
