"""Linear layers whose weight is shared out over the owners, with an optional low-rank adapter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.config import LoraConfig
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.sharding import SPLIT, WHOLE, Owners

INIT_STD = 0.02


class Adapter(nnx.Param):
    """A matrix of a low-rank adapter: small, in the statistics dtype, replicated."""


def gather_whole(weight: jax.Array, shape: tuple[int, ...], owners: Owners) -> jax.Array:
    """Gathers the dimension in which `weight` is a shard of `shape`; a replicated weight comes back as it is.

    Under differentiation the gather's transpose sums the owners' cotangents and leaves each its shard.
    """
    for axis, size in enumerate(shape):
        if weight.shape[axis] != size:
            return owners.gather(weight, axis)
    return weight


class Linear(nnx.Module):
    """y = W x, no bias; with an adapter y = W x + scale * B (A x) (Hu et al., 2021, eq. 3). W is [out, in] as in PyTorch."""

    def __init__(self, features_in: int, features_out: int, *, dtype, rngs: nnx.Rngs, lora: LoraConfig | None = None):
        self.shape = (features_out, features_in)
        init = jax.random.normal(rngs.params(), self.shape, jnp.float32) * INIT_STD
        self.weight = nnx.Param(init.astype(dtype), axes=(SPLIT, SPLIT))
        self.scale = lora.scale if lora else None
        if lora:
            # PEFT's start: A uniform in +-sqrt(1 / in) (Kaiming with a = sqrt 5), B zero, so that the fresh adapter changes nothing
            bound = features_in**-0.5
            a = jax.random.uniform(rngs.params(), (lora.rank, features_in), jnp.float32, -bound, bound)
            wide = statistics_dtype(dtype)
            self.lora_A = Adapter(a.astype(wide), axes=(WHOLE, WHOLE))
            self.lora_B = Adapter(jnp.zeros((features_out, lora.rank), wide), axes=(WHOLE, WHOLE))

    def __call__(self, x: Float[Array, "T in"], owners: Owners) -> Float[Array, "T out"]:
        weight = gather_whole(self.weight[...], self.shape, owners).astype(x.dtype)
        y = jnp.einsum("ti,oi->to", x, weight)
        if self.scale is None:
            return y
        low = jnp.einsum("ti,ri->tr", x, self.lora_A[...].astype(x.dtype))
        return y + jnp.einsum("tr,or->to", low, self.lora_B[...].astype(x.dtype)) * jnp.asarray(self.scale, x.dtype)
