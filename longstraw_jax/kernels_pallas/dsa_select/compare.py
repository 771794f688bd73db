"""dsa_select's kernel against its XLA version, on the machine at hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.kernels_pallas.dsa_select import blocked, kernel
from longstraw_jax.kernels_pallas.dsa_select.candidates import Candidates
from longstraw_jax.kernels_pallas.dsa_select.shapes import SelectShape

_QUERIES = 33


def compare(dtype: str, heads: int, width: int, k: int, interpret: bool = False) -> str | None:
    """What differs in the selection of k among twice as many keys; None if nothing does.

    The numbers are small integers, whose scores are exact in any order of summation, and many of which tie.
    """
    shape, rng = SelectShape(_QUERIES, 2 * k + 77, heads=heads, width=width, k=k), np.random.default_rng(0)
    q, w, _, rows = (jnp.asarray(rng.integers(-1, 2, x.shape), dtype) for x in shape.abstract())
    positions = jnp.asarray(rng.integers(0, shape.keys, _QUERIES), jnp.int32)

    def selected(select):
        none = Candidates.none(_QUERIES, k, q.dtype)
        return jax.jit(lambda q, w, positions, rows: tuple(select(q, w, positions, shape.stretch(rows), none)))(q, w, positions, rows)

    given = selected(functools.partial(kernel.select, interpret=interpret))
    wanted = selected(lambda q, w, positions, keys, none: blocked.select(q, w, positions, keys, 1024, none))
    same = [bool((x == y).all()) for x, y in zip(given, wanted, strict=True)]
    return None if all(same) else "selects other keys than the plain formula"
