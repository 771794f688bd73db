"""RMS norms. The mean of squares is taken in the statistics dtype, whatever the activations'."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.models.layers.declare import Constant, parameter
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.sharding import WHOLE


def rms(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in the statistics dtype."""
    x = x.astype(statistics_dtype(x.dtype))
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


class ZeroCentredNorm(nnx.Module):
    """rms(x) * (1 + w), multiplied before the cast (transformers, modeling_qwen3_5.Qwen3_5RMSNorm)."""

    def __init__(self, features: int, eps: float, *, dtype):
        self.weight = parameter((features,), dtype, (WHOLE,), Constant(0))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = rms(x, self.eps)
        weight = jnp.broadcast_to(1 + self.weight[...].astype(wide.dtype), x.shape)
        return (wide * weight).astype(x.dtype)


class GatedNorm(nnx.Module):
    """w * rms(x) * silu(gate): plain weight, normalised before it is gated (Qwen3_5RMSNormGated)."""

    def __init__(self, features: int, eps: float, *, dtype):
        self.weight = parameter((features,), dtype, (WHOLE,), Constant(1))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"], gate: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = statistics_dtype(x.dtype)
        weight = jnp.broadcast_to(self.weight[...].astype(x.dtype), x.shape)
        normed = weight * rms(x, self.eps).astype(x.dtype)
        return (normed.astype(wide) * jax.nn.silu(gate.astype(wide))).astype(x.dtype)


class Norm(nnx.Module):
    """w * rms(x), cast before it is multiplied (GlmMoeDsaRMSNorm)."""

    def __init__(self, features: int, eps: float, *, dtype):
        self.weight = parameter((features,), dtype, (WHOLE,), Constant(1))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return jnp.broadcast_to(self.weight[...].astype(x.dtype), x.shape) * rms(x, self.eps).astype(x.dtype)


class LayerNorm(nnx.Module):
    """w * (x - mean) / sqrt(variance + eps) + b over the last dimension, in the statistics dtype (Ba et al., 2016)."""

    def __init__(self, features: int, eps: float, *, dtype, kind: type[nnx.Param] = nnx.Param):
        self.weight = parameter((features,), dtype, (WHOLE,), Constant(1), kind)
        self.bias = parameter((features,), dtype, (WHOLE,), Constant(0), kind)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(statistics_dtype(x.dtype))
        normed = rms(wide - wide.mean(-1, keepdims=True), self.eps)
        weight, bias = (jnp.broadcast_to(p[...].astype(wide.dtype), x.shape) for p in (self.weight, self.bias))
        return (normed * weight + bias).astype(x.dtype)
