"""Qwen3.6's text model in its plainest form: one device, whole sequence, one token of the recurrence after another.

This is the oracle that every fast path is held against, so it has no chunking, no cache and no sharding, and follows the
equations of transformers' `modeling_qwen3_5.py` one by one. Statistics (norms, softmax, the delta rule, log-softmax) are in
float32, or in float64 where the weights are. Run it under `jax.default_matmul_precision("highest")`, and pass the weights to
`jax.jit` as arguments: XLA spends minutes folding them when they are closed over.

`stop` gives the response gradient. The resident state of positions 0 .. stop-1 is cut from the gradient where later
positions read it: keys and values, the recurrent state after token stop-1, and the inputs of the convolution. A loss on
positions >= stop then has its gradient at a fixed state of the prompt. Outputs at positions < stop keep their values, but
their gradients mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from longstraw_jax.errors import InputError
from longstraw_jax.models.qwen36.spec import Qwen36Spec

Weights = Mapping[str, Float[Array, "..."]]
"""By the checkpoint's names without the composite's `language_model.`: `model.layers.0.mlp.up_proj.weight` [out, in]."""

Adapters = Mapping[str, tuple[Float[Array, "..."], Float[Array, "..."]]]
"""`layers.0.mlp.up_proj` -> (A [rank, in], B [out, rank])."""

NO_ADAPTERS: Adapters = MappingProxyType({})

Scalar = float | Float[Array, ""]


def hidden_states(
    weights: Weights, ids: Int[Array, "T"], spec: Qwen36Spec, adapters: Adapters = NO_ADAPTERS, scale: Scalar = 0.0,
    stop: int = 0,
) -> Float[Array, "T D"]:
    """The last layer's output after the final norm. `scale` is LoRA's alpha / rank; y = W x + scale B A x."""
    _check(weights, ids, adapters, stop)
    x = weights["model.embed_tokens.weight"][ids]
    for index in range(spec.num_hidden_layers):
        layer = _Layer(weights, adapters, scale, spec, stop, f"layers.{index}")
        mixer = _attention if (index + 1) % spec.full_attention_interval == 0 else _gated_delta_net
        x = x + mixer(layer, layer.norm("input_layernorm", x))
        x = x + _mlp(layer, layer.norm("post_attention_layernorm", x))
    return _zero_centred_norm(x, weights["model.norm.weight"], spec.rms_norm_eps)


def logits(
    weights: Weights, ids: Int[Array, "T"], spec: Qwen36Spec, adapters: Adapters = NO_ADAPTERS, scale: Scalar = 0.0,
    stop: int = 0,
) -> Float[Array, "T V"]:
    """Entry t scores the token after ids[t]. At least float32, whatever the weights are."""
    return _wide(hidden_states(weights, ids, spec, adapters, scale, stop) @ weights["lm_head.weight"].T)


def logprobs(
    weights: Weights, ids: Int[Array, "T"], spec: Qwen36Spec, adapters: Adapters = NO_ADAPTERS, scale: Scalar = 0.0,
    stop: int = 0, temperature: Scalar = 1.0,
) -> Float[Array, "T-1"]:
    """Entry t is log p(ids[t+1] | ids[:t+1]), in nats, of the logits divided by `temperature`."""
    scores = jax.nn.log_softmax(logits(weights, ids, spec, adapters, scale, stop)[:-1] / temperature)
    return jnp.take_along_axis(scores, ids[1:, None], axis=-1)[:, 0]


def _check(weights: Weights, ids: Array, adapters: Adapters, stop: int) -> None:
    # A misspelt adapter would otherwise be left out in silence, and an oracle must not agree by accident.
    unknown = sorted(name for name in adapters if f"model.{name}.weight" not in weights)
    if unknown:
        raise InputError(f"adapter {unknown[0]!r} names no layer of the weights; wanted a name like 'layers.0.mlp.up_proj'")
    if not 0 <= stop <= ids.shape[0]:
        raise InputError(f"stop is {stop} for a sequence of {ids.shape[0]} tokens; wanted 0 <= stop <= its length")


@dataclass(frozen=True)
class _Layer:
    """One layer's view of the weights and adapters, by the names that follow `model.layers.N.`"""

    weights: Weights
    adapters: Adapters
    scale: Scalar
    spec: Qwen36Spec
    stop: int
    prefix: str

    def weight(self, name: str) -> Array:
        return self.weights[f"model.{self.prefix}.{name}"]

    def norm(self, name: str, x: Array) -> Array:
        return _zero_centred_norm(x, self.weight(f"{name}.weight"), self.spec.rms_norm_eps)

    def linear(self, name: str, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        y = x @ self.weight(f"{name}.weight").T
        if f"{self.prefix}.{name}" not in self.adapters:
            return y
        down, up = self.adapters[f"{self.prefix}.{name}"]
        return (y + self.scale * ((x @ down.T) @ up.T)).astype(y.dtype)


def _mlp(layer: _Layer, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return layer.linear("mlp.down_proj", jax.nn.silu(layer.linear("mlp.gate_proj", x)) * layer.linear("mlp.up_proj", x))


def _attention(layer: _Layer, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Gated softmax attention, grouped queries: query head h reads key head h // (H / KV). `Qwen3_5Attention`."""
    spec, tokens = layer.spec, x.shape[0]
    # Each head's rows hold its query, then its gate.
    query, gate = jnp.split(layer.linear("self_attn.q_proj", x).reshape(tokens, spec.num_attention_heads, -1), 2, axis=-1)
    key = layer.linear("self_attn.k_proj", x).reshape(tokens, spec.num_key_value_heads, -1)
    value = layer.linear("self_attn.v_proj", x).reshape(tokens, spec.num_key_value_heads, -1)
    query = _rope(layer.norm("self_attn.q_norm", query), spec)
    key = _detach(_rope(layer.norm("self_attn.k_norm", key), spec), layer.stop)
    value = _detach(value, layer.stop)

    group = spec.num_attention_heads // spec.num_key_value_heads
    key, value = (_wide(jnp.repeat(a, group, axis=1)) for a in (key, value))
    scores = jnp.einsum("thd,shd->hts", _wide(query), key) * spec.head_dim**-0.5
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("hts,shd->thd", weights, value).astype(x.dtype)
    return layer.linear("self_attn.o_proj", (mixed * jax.nn.sigmoid(gate)).reshape(tokens, -1))


def _rope(x: Float[Array, "T H d"], spec: Qwen36Spec) -> Float[Array, "T H d"]:
    """Rotates dimensions j and j + r/2 of the first r by position * theta^(-2j/r) (Su et al., 2021, in halves).

    Text has equal temporal, height and width positions, for which Qwen's interleaved multimodal form is just this.
    """
    half = spec.rotary_dim // 2
    dtype = _wide(x).dtype
    frequency = jnp.asarray(spec.rope_theta ** (-np.arange(half) / half), dtype)
    angle = jnp.arange(x.shape[0], dtype=dtype)[:, None, None] * frequency[None, None]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _gated_delta_net(layer: _Layer, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Gated DeltaNet (Yang et al., 2024); value head h reads key head h // (Hv / Hk). `Qwen3_5GatedDeltaNet`."""
    spec, tokens = layer.spec, x.shape[0]
    inputs = _detach(layer.linear("linear_attn.in_proj_qkv", x), layer.stop)
    mixed = jax.nn.silu(_causal_conv(inputs, layer.weight("linear_attn.conv1d.weight")))
    keys = spec.linear_num_key_heads * spec.linear_key_head_dim
    query, key, value = jnp.split(mixed, [keys, 2 * keys], axis=-1)

    ratio = spec.linear_num_value_heads // spec.linear_num_key_heads
    query, key = (_l2_norm(_wide(a).reshape(tokens, spec.linear_num_key_heads, -1)) for a in (query, key))
    query, key = (jnp.repeat(a, ratio, axis=1) for a in (query, key))
    query = query * spec.linear_key_head_dim**-0.5
    value = _wide(value).reshape(tokens, spec.linear_num_value_heads, -1)
    beta = _wide(jax.nn.sigmoid(layer.linear("linear_attn.in_proj_b", x)))
    rate, bias = (_wide(layer.weight(f"linear_attn.{name}"))[None] for name in ("A_log", "dt_bias"))
    decay = jnp.exp(-jnp.exp(rate) * jax.nn.softplus(_wide(layer.linear("linear_attn.in_proj_a", x)) + bias))

    read = _delta_rule((query, key, value, decay, beta), layer.stop).astype(x.dtype)
    gate = layer.linear("linear_attn.in_proj_z", x).reshape(read.shape)
    gated = _gated_norm(read, gate, layer.weight("linear_attn.norm.weight"), spec.rms_norm_eps)
    return layer.linear("linear_attn.out_proj", gated.reshape(tokens, -1))


def _causal_conv(x: Float[Array, "T C"], kernel: Float[Array, "C 1 K"]) -> Float[Array, "T C"]:
    """y[t, c] = sum_j kernel[c, 0, j] x[t - (K-1) + j, c], x being 0 before the sequence."""
    width = kernel.shape[-1]
    padded = jnp.pad(x, ((width - 1, 0), (0, 0)))
    return sum(padded[j : j + x.shape[0]] * kernel[None, :, 0, j] for j in range(width))


def _delta_rule(tokens: tuple[Array, ...], stop: int) -> Float[Array, "T H v"]:
    """The reads of all tokens, from a zero state; the state after token stop-1 is detached."""
    query, _, value, *_ = tokens
    state = jnp.zeros((query.shape[1], query.shape[2], value.shape[2]), value.dtype)
    state, early = jax.lax.scan(_delta_step, state, [a[:stop] for a in tokens])
    _, late = jax.lax.scan(_delta_step, jax.lax.stop_gradient(state), [a[stop:] for a in tokens])
    return jnp.concatenate([early, late])


def _delta_step(state: Float[Array, "H k v"], token: list[Array]) -> tuple[Float[Array, "H k v"], Float[Array, "H v"]]:
    """Decay, write what the state does not yet say about the key, read (Yang et al., 2024, eq. 10)."""
    query, key, value, decay, beta = token
    state = decay[:, None, None] * state
    delta = beta[:, None] * (value - jnp.einsum("hkv,hk->hv", state, key))
    state = state + key[:, :, None] * delta[:, None, :]
    return state, jnp.einsum("hkv,hk->hv", state, query)


def _rms(x: Array, eps: float) -> Array:
    x = _wide(x)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _zero_centred_norm(x: Array, weight: Array, eps: float) -> Array:
    """`Qwen3_5RMSNorm`: the stored weight is the difference from 1."""
    return (_rms(x, eps) * _channels(1 + _wide(weight), x)).astype(x.dtype)


def _gated_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """`Qwen3_5RMSNormGated`: a plain weight, and the norm before the gate."""
    return (_wide(_channels(weight, x) * _rms(x, eps).astype(x.dtype)) * jax.nn.silu(_wide(gate))).astype(x.dtype)


def _channels(weight: Float[Array, "C"], x: Float[Array, "... C"]) -> Array:
    """The weight in x's rank, so that nothing here depends on implicit rank promotion."""
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def _l2_norm(x: Array) -> Array:
    # This epsilon is the delta rule's own, not the configuration's rms_norm_eps.
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _detach(x: Float[Array, "T ..."], stop: int) -> Float[Array, "T ..."]:
    return jnp.concatenate([jax.lax.stop_gradient(x[:stop]), x[stop:]])


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
