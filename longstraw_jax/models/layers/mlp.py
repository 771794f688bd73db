"""The gated feed-forward block: down(silu(gate x) * up x)."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.sharding import Owners


class GatedMlp(nnx.Module):
    """`linear(name, features_in, features_out)` makes the three projections, with or without an adapter."""

    def __init__(self, features: int, hidden: int, linear):
        self.gate_proj = linear("gate_proj", features, hidden)
        self.up_proj = linear("up_proj", features, hidden)
        self.down_proj = linear("down_proj", hidden, features)

    def __call__(self, x: Float[Array, "T D"], owners: Owners) -> Float[Array, "T D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x, owners)) * self.up_proj(x, owners), owners)
