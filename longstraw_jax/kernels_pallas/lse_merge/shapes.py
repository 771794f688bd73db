"""Sizes at which lse_merge runs in earnest: tests compile the kernels for them, benches time them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class MergeShape:
    """float32 partials of `owners` owners for `tokens` tokens, as the attention layers send them."""

    owners: int
    tokens: int
    heads: int
    width: int

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """partials, lse"""
        partials = (self.owners, self.tokens, self.heads, self.width)
        return jax.ShapeDtypeStruct(partials, jnp.float32), jax.ShapeDtypeStruct(partials[:3], jnp.float32)

    def cotangents(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Of the output and of the LSE; the results' own shapes."""
        rows = (self.tokens, self.heads)
        return jax.ShapeDtypeStruct((*rows, self.width), jnp.float32), jax.ShapeDtypeStruct(rows, jnp.float32)

    @property
    def numbers(self) -> int:
        """In the partials."""
        return self.owners * self.tokens * self.heads * self.width

    @property
    def bytes(self) -> int:
        """That the merge must move: partials and LSE in, output and LSE out."""
        return 4 * (self.owners + 1) * self.tokens * self.heads * (self.width + 1)

    @property
    def flops(self) -> int:
        return 2 * self.numbers

    @property
    def pull_bytes(self) -> int:
        """That its transpose must move: partials and LSE in, their cotangents out, and the output, its LSE and both cotangents in."""
        return 4 * (2 * self.owners + 2) * self.tokens * self.heads * (self.width + 1)

    @property
    def pull_flops(self) -> int:
        return 3 * self.numbers


SHAPES = {
    "grouped_query_8_owners": MergeShape(owners=8, tokens=256, heads=24, width=256),
    "latent_32_owners": MergeShape(owners=32, tokens=16, heads=64, width=512),
    "latent_64_owners_one_token": MergeShape(owners=64, tokens=1, heads=64, width=512),
}
"""A tile of 256 queries of grouped-query attention on 8 devices; of 16 queries of latent attention on 32; and of a single one."""
