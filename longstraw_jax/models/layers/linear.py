"""Linear layers whose weight is shared out over the owners, with an optional low-rank adapter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.config import LoraConfig
from longstraw_jax.models.layers.declare import Constant, Normal, Uniform, parameter
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

    def __init__(self, features_in: int, features_out: int, *, dtype, lora: LoraConfig | None = None, kind: type[nnx.Param] = nnx.Param):
        self.shape = (features_out, features_in)
        self.weight = parameter(self.shape, dtype, (SPLIT, SPLIT), Normal(INIT_STD), kind)
        self.scale = lora.scale if lora else None
        if lora:
            # PEFT's start: A uniform in +-sqrt(1 / in) (Kaiming with a = sqrt 5), B zero, so that the fresh adapter changes nothing
            wide, bound = statistics_dtype(dtype), features_in**-0.5
            self.lora_A = parameter((lora.rank, features_in), wide, (WHOLE, WHOLE), Uniform(-bound, bound), Adapter)
            self.lora_B = parameter((features_out, lora.rank), wide, (WHOLE, WHOLE), Constant(0), Adapter)

    def __call__(self, x: Float[Array, "T in"], owners: Owners) -> Float[Array, "T out"]:
        weight = gather_whole(self.weight[...], self.shape, owners).astype(x.dtype)
        y = jnp.einsum("ti,oi->to", x, weight)
        if self.scale is None:
            return y
        low = jnp.einsum("ti,ri->tr", x, self.lora_A[...].astype(x.dtype))
        return y + jnp.einsum("tr,or->to", low, self.lora_B[...].astype(x.dtype)) * jnp.asarray(self.scale, x.dtype)
