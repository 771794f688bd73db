"""Sizes at which dsa_select runs in earnest: tests compile the kernel for them, benches time them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from longstraw_jax.sharding import Layout, Owners, Stretch


@dataclass(frozen=True)
class SelectShape:
    """bfloat16 queries against the keys of one layer out of `layers`, all of them visible."""

    queries: int
    keys: int
    layers: int = 1
    heads: int = 32
    width: int = 128
    k: int = 2048

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, w, positions, rows"""
        shape = jax.ShapeDtypeStruct
        return (
            shape((self.queries, self.heads, self.width), jnp.bfloat16), shape((self.queries, self.heads), jnp.bfloat16),
            shape((self.queries,), jnp.int32), shape((self.layers, self.keys, self.width), jnp.bfloat16))

    def stretch(self, rows: jax.Array) -> Stretch:
        """The last layer, on a single owner."""
        return Stretch(rows, jnp.int32(self.layers - 1), jnp.int32(0), jnp.int32(self.keys), Layout(Owners((), 1), 64), dealt=64)

    @property
    def bytes(self) -> int:
        """That any selection must move: queries, weights and keys in, candidates in and out."""
        return 2 * self.queries * self.heads * (self.width + 1) + 2 * self.keys * self.width + 16 * self.queries * self.k

    @property
    def flops(self) -> int:
        """Of the products with the keys and the weighted sum over heads."""
        return 2 * self.queries * self.keys * self.heads * (self.width + 1)


SHAPES = {
    "rounds_32_owners": SelectShape(queries=1024, keys=65_536, layers=21),
    "fetched_2m": SelectShape(queries=256, keys=2_097_152),
    "one_query": SelectShape(queries=1, keys=65_536, layers=21),
    "stack_beyond_4_gib": SelectShape(queries=64, keys=1_048_576, layers=21),
}
"""All owners' queries of a replayed block against an owner's keys of two million; a tile of a captured chunk against all of
them; a single query; and a stack of pages whose offsets need 64 bits."""
