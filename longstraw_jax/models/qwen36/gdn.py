"""The Gated DeltaNet layer of Qwen3.6 (transformers, modeling_qwen3_5.Qwen3_5GatedDeltaNet), with its state in and out.

Projections run where the tokens are. One exchange turns token shards into head shards, so that every owner scans the whole
segment in token order with its own heads and no owner starts from an empty state; a second one turns the result back.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from longstraw_jax.errors import UnsupportedError
from longstraw_jax.models.base import Segment
from longstraw_jax.models.layers.declare import Constant, Uniform, parameter
from longstraw_jax.models.layers.delta_rule import delta_rule_chunked
from longstraw_jax.models.layers.mlp import GatedMlp
from longstraw_jax.models.layers.norms import GatedNorm, ZeroCentredNorm
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.qwen36.spec import Qwen36Spec
from longstraw_jax.sharding import WHOLE, Owners

_L2_EPS = 1e-6  # inside the square root, fixed in the reference, not the config's rms_norm_eps


@dataclass(frozen=True)
class HeadShards:
    """How one owner's heads lie. Value head h reads key head h // (value heads / key heads).

    Where the owners do not divide the key heads, each key head is repeated `repeat` times (its value heads are consecutive,
    so copies and value heads stay aligned) until they do.
    """

    spec: Qwen36Spec
    owners: int

    def __post_init__(self):
        heads = self.spec.linear_num_value_heads
        if heads % self.owners:
            degrees = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
            raise UnsupportedError(f"{self.owners} context owners cannot share {heads} Gated DeltaNet value heads evenly; "
                                   f"use a mesh of {degrees} devices")

    @property
    def repeat(self) -> int:
        ratio = self.spec.linear_num_value_heads // self.spec.linear_num_key_heads
        return next(r for r in range(1, ratio + 1) if ratio % r == 0 and (self.spec.linear_num_key_heads * r) % self.owners == 0)

    @property
    def key_heads(self) -> int:
        return self.spec.linear_num_key_heads * self.repeat // self.owners

    @property
    def value_heads(self) -> int:
        return self.spec.linear_num_value_heads // self.owners

    @property
    def channels(self) -> int:
        """Channels of one owner's convolution: [queries | keys | values]."""
        return 2 * self.key_heads * self.spec.linear_key_head_dim + self.value_heads * self.spec.linear_value_head_dim

    def split(self, x: jax.Array) -> jax.Array:
        """[..., conv channels] -> [..., owners, channels of one owner]."""
        spec, lead = self.spec, x.shape[:-1]
        keys = spec.linear_num_key_heads * spec.linear_key_head_dim
        q, k, v = x[..., :keys], x[..., keys : 2 * keys], x[..., 2 * keys :]
        q, k = (jnp.repeat(y.reshape(*lead, spec.linear_num_key_heads, -1), self.repeat, axis=-2) for y in (q, k))
        return jnp.concatenate([y.reshape(*lead, self.owners, -1) for y in (q, k, v)], -1)

    def heads(self, x: Float[Array, "T C"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One owner's channels -> q [T, Hk, K], k [T, Hk, K], v [T, H, V]."""
        keys = self.key_heads * self.spec.linear_key_head_dim
        q, k = (y.reshape(x.shape[0], self.key_heads, -1) for y in (x[:, :keys], x[:, keys : 2 * keys]))
        return q, k, x[:, 2 * keys :].reshape(x.shape[0], self.value_heads, -1)


class LinearAttention(nnx.Module):
    """Parameters only; names are the checkpoint's. A_log and dt_bias are never narrower than float32."""

    def __init__(self, spec: Qwen36Spec, linear, *, dtype):
        width, heads = spec.linear_num_value_heads * spec.linear_value_head_dim, spec.linear_num_value_heads
        wide = statistics_dtype(dtype)
        self.in_proj_qkv = linear("in_proj_qkv", spec.hidden_size, spec.conv_channels)
        self.in_proj_z = linear("in_proj_z", spec.hidden_size, width)
        self.in_proj_b = linear("in_proj_b", spec.hidden_size, heads)
        self.in_proj_a = linear("in_proj_a", spec.hidden_size, heads)
        self.out_proj = linear("out_proj", width, spec.hidden_size)
        taps = spec.linear_conv_kernel_dim
        self.conv1d = ConvWeight(spec.conv_channels, taps, dtype)
        self.A_log = parameter((heads,), wide, (WHOLE,), Uniform(0.01, 16.0, log=True))
        self.dt_bias = parameter((heads,), wide, (WHOLE,), Constant(1))
        self.norm = GatedNorm(spec.linear_value_head_dim, spec.rms_norm_eps, dtype=dtype)


class ConvWeight(nnx.Module):
    """A depthwise convolution's [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int, dtype):
        self.weight = parameter((channels, 1, taps), dtype, (WHOLE, WHOLE, WHOLE), Uniform(-(taps**-0.5), taps**-0.5))


class GdnLayer(nnx.Module):
    def __init__(self, spec: Qwen36Spec, linear, chunk: int, *, dtype):
        self.spec, self.chunk = spec, chunk
        self.input_layernorm = ZeroCentredNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.linear_attn = LinearAttention(spec, linear, dtype=dtype)
        self.post_attention_layernorm = ZeroCentredNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMlp(spec.hidden_size, spec.intermediate_size, linear)

    def __call__(self, x: Float[Array, "T M"], state: dict, segment: Segment) -> tuple[Float[Array, "T M"], dict]:
        """(output, state after the segment). State: `S` [H, K, V] and the last pre-convolution inputs `tail` [taps - 1, C]."""
        attn, owners, tokens = self.linear_attn, segment.owners, x.shape[0]
        u = self.input_layernorm(x)
        z = attn.in_proj_z(u, owners).reshape(tokens, self.spec.linear_num_value_heads, -1)
        out, state = self._recurrence(u, state, segment)
        mixed = attn.norm(out, z).reshape(tokens, -1)
        h = x + attn.out_proj(mixed, owners)
        return h + self.mlp(self.post_attention_layernorm(h), owners), state

    def _recurrence(self, u, state, segment):
        """u [T, M] of the owner's tokens -> delta rule's output [T, all value heads, V] of the same tokens."""
        attn, owners = self.linear_attn, segment.owners
        shards = HeadShards(self.spec, owners.count)
        packed = jnp.concatenate([
            shards.split(attn.in_proj_qkv(u, owners)),
            attn.in_proj_b(u, owners).reshape(u.shape[0], owners.count, -1),
            attn.in_proj_a(u, owners).reshape(u.shape[0], owners.count, -1)], -1)
        packed = segment.layout.to_sequence(owners.exchange(packed.swapaxes(0, 1)))
        in_order = segment.start + jnp.arange(packed.shape[0])
        mixed, b, a = jnp.split(segment.hold(packed, in_order), [shards.channels, shards.channels + shards.value_heads], -1)
        q, k, v, tail = self._convolve(mixed, state["tail"], segment, shards)
        beta, g = self._gates(b, a, owners, shards)
        # held once more behind the convolution and the gates, whose own parameters would else learn from fixed tokens
        q, k, v, beta, g = (segment.hold(x, in_order) for x in (q, k, v, beta, g))
        # a pad writes nothing and forgets nothing
        real = (jnp.arange(mixed.shape[0]) < segment.length)[:, None]
        k, beta, g = jnp.where(real[..., None], k, 0), jnp.where(real, beta, 0), jnp.where(real, g, 0)
        out, s = delta_rule_chunked(q, k, v, g, beta, state["S"], self.chunk)
        out = segment.layout.from_sequence(out.astype(u.dtype).reshape(out.shape[0], -1))
        out = owners.exchange(out).swapaxes(0, 1).reshape(u.shape[0], self.spec.linear_num_value_heads, -1)
        return out, {"S": s, "tail": tail}

    def _convolve(self, mixed, tail, segment, shards):
        """Causal depthwise convolution and silu; q and k scaled to unit length, q by K^-1/2; the new tail."""
        wide, taps, tokens = statistics_dtype(mixed.dtype), self.spec.linear_conv_kernel_dim, mixed.shape[0]
        weight = shards.split(self.linear_attn.conv1d.weight[...][:, 0].T)[:, _own(segment.owners)].astype(wide)
        padded = jnp.concatenate([tail, mixed])
        y = jax.nn.silu(sum(padded[j : j + tokens].astype(wide) * weight[j, None] for j in range(taps)))
        q, k, v = shards.heads(y)
        q, k = (x * lax.rsqrt((x * x).sum(-1, keepdims=True) + _L2_EPS) for x in (q, k))
        return q * q.shape[-1] ** -0.5, k, v, lax.dynamic_slice_in_dim(padded, segment.length, taps - 1)

    def _gates(self, b, a, owners: Owners, shards):
        """beta = sigmoid(b); g = -exp(A_log) softplus(a + dt_bias), the log-decay; [T, own value heads]."""
        attn, wide = self.linear_attn, statistics_dtype(b.dtype)
        a_log, dt_bias = (p[...].reshape(owners.count, 1, -1)[_own(owners)].astype(wide) for p in (attn.A_log, attn.dt_bias))
        return jax.nn.sigmoid(b.astype(wide)), -jnp.exp(a_log) * jax.nn.softplus(a.astype(wide) + dt_bias)


def _own(owners: Owners):
    return owners.index() if owners.count > 1 else 0
