"""Linear layers whose weight is shared out over the owners, with an optional low-rank adapter."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.config import LoraConfig
from longstraw_jax.models.layers.declare import Constant, Normal, Uniform, parameter
from longstraw_jax.models.layers.nf4 import Nf4Matrix
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.sharding import SPLIT, WHOLE, Owners, gather_whole

INIT_STD = 0.02


class Adapter(nnx.Param):
    """A matrix of a low-rank adapter: small, in the statistics dtype, replicated."""


def declare_matrix(
    shape: tuple[int, ...], dtype, axes: tuple[str | None, ...], packed: bool, kind: type[nnx.Param] = nnx.Param
) -> nnx.Param | Nf4Matrix:
    """A weight matrix [.., out, in], plain or in NF4."""
    init = Normal(INIT_STD)
    return Nf4Matrix(shape, dtype, axes, init) if packed else parameter(shape, dtype, axes, init, kind)


class Linear(nnx.Module):
    """y = W x, no bias; with an adapter y = W x + scale * B (A x) (Hu et al., 2021, eq. 3). W is [out, in] as in PyTorch.

    `packed` holds W in NF4, frozen.
    """

    def __init__(
        self, features_in: int, features_out: int, *, dtype, lora: LoraConfig | None = None, packed: bool = False,
        kind: type[nnx.Param] = nnx.Param,
    ):
        self.shape = (features_out, features_in)
        self.weight = declare_matrix(self.shape, dtype, (SPLIT, SPLIT), packed, kind)
        self.scale = lora.scale if lora else None
        if lora:
            # PEFT's start: A uniform in +-sqrt(1 / in) (Kaiming with a = sqrt 5), B zero, so that the fresh adapter changes nothing
            wide, bound = statistics_dtype(dtype), features_in**-0.5
            self.lora_A = parameter((lora.rank, features_in), wide, (WHOLE, WHOLE), Uniform(-bound, bound), Adapter)
            self.lora_B = parameter((features_out, lora.rank), wide, (WHOLE, WHOLE), Constant(0), Adapter)

    def matrix(self, owners: Owners, dtype) -> Float[Array, "out in"]:
        """W, whole, in `dtype`."""
        if isinstance(self.weight, Nf4Matrix):
            return self.weight.whole(owners, dtype)
        return gather_whole(self.weight[...], self.shape, owners).astype(dtype)

    def __call__(self, x: Float[Array, "T in"], owners: Owners) -> Float[Array, "T out"]:
        y = jnp.einsum("ti,oi->to", x, self.matrix(owners, x.dtype))
        if self.scale is None:
            return y
        low = jnp.einsum("ti,ri->tr", x, self.lora_A[...].astype(x.dtype))
        return y + jnp.einsum("tr,or->to", low, self.lora_B[...].astype(x.dtype)) * jnp.asarray(self.scale, x.dtype)
