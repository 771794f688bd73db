"""How a stage becomes a program: one `jit(shard_map(...))`, every collective written out, big buffers donated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh


def stage_program(f: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> Callable:
    """`f` on every device's shards, compiled once per shape.

    Replication is not checked by JAX (check_vma): accumulators differ between devices until their one sum at the end.
    Products of float32 matrices are taken in full: the delta rule's chunks need it, and the large products are narrower anyway.
    """

    def exact(*args):
        with jax.default_matmul_precision("highest"):
            return f(*args)

    mapped = jax.shard_map(exact, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=tuple(donate))
