"""Sizes at which dense_attention runs in earnest: benches time them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class AttentionShape:
    """bfloat16 queries of `heads` heads against rows of `kv` key-value heads."""

    queries: int
    keys: int
    heads: int = 24
    kv: int = 4
    width: int = 256

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k, v"""
        rows = jax.ShapeDtypeStruct((self.keys, self.kv, self.width), jnp.bfloat16)
        return jax.ShapeDtypeStruct((self.queries, self.heads, self.width), jnp.bfloat16), rows, rows

    @property
    def bytes(self) -> int:
        """That any implementation must move: queries, keys and values in, output and LSE out."""
        return 4 * (self.queries * self.heads + self.keys * self.kv) * self.width + 4 * self.queries * self.heads

    @property
    def flops(self) -> int:
        """Of the products with keys and with values."""
        return 4 * self.queries * self.keys * self.heads * self.width


SHAPES = {
    "prefix_tile_8_owners": AttentionShape(queries=2048, keys=16_384),
    "prefix_tile_1_owner": AttentionShape(queries=256, keys=16_384),
}
"""All owners' queries of a tile against 16 blocks of an owner's rows of the prompt; and on a single device."""
