"""GLM-5.2 in its plainest form: one device, the whole sequence, every expert on every token.

This is the oracle that every fast path is held against, so it has no pages, no dispatch and no sharding, and follows the
equations of transformers' `modeling_glm_moe_dsa.py` one by one. Statistics (norms, softmax, index scores, the router,
log-softmax) are in float32, or in float64 where the weights are. Run it under `jax.default_matmul_precision("highest")`, and
pass the weights to `jax.jit` as arguments: XLA spends minutes folding them when they are closed over.

What the indexer selects and where the router sends a token are choices, and have no derivative: the gradient is that at fixed
choices. The indexer's own parameters get a gradient of 0; the router's come from the weights of the experts it chose.

`stop` gives the response gradient. The resident state of positions 0 .. stop-1, their latents and rotated keys, is cut from
the gradient where later positions read it (`kv_b_proj` acts on the latents after that, so its gradient has their share). A
loss on positions >= stop then has its gradient at a fixed state of the prompt. Outputs at positions < stop keep their values,
but their gradients mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax.errors import InputError
from longstraw_jax.models.glm52.spec import FULL, Glm52Spec

Weights = Mapping[str, Float[Array, "..."]]
"""By the names on disk, where each expert has its own: `model.layers.3.mlp.experts.0.up_proj.weight` [out, in]."""

Adapters = Mapping[str, tuple[Float[Array, "..."], Float[Array, "..."]]]
"""`layers.3.mlp.experts.0.up_proj` -> (A [rank, in], B [out, rank]); every expert's pair of a projection has one rank."""

NO_ADAPTERS: Adapters = MappingProxyType({})

Scalar = float | Float[Array, ""]

Stop = int | Int[Array, ""]

_MLP = ("gate_proj", "up_proj", "down_proj")


class Trace(NamedTuple):
    """A forward pass and the choices made in it, by layer number."""

    hidden: Float[Array, "T D"]
    """The last layer's output after the final norm."""
    selected: dict[int, Bool[Array, "T T"]]
    """Of each full layer: [t, s] where token t attends to position s. Never more than index_topk in a row, none after t."""
    routed: dict[int, Int[Array, "T K"]]
    """Of each layer with experts: the experts of token t, the best first."""


def trace(
    weights: Weights, ids: Int[Array, "T"], spec: Glm52Spec, adapters: Adapters = NO_ADAPTERS, scale: Scalar = 0.0,
    stop: Stop = 0,
) -> Trace:
    """`scale` is LoRA's alpha / rank; y = W x + scale B A x."""
    _check(ids, spec, adapters, stop)
    x = weights["model.embed_tokens.weight"][ids]
    selected, routed = {}, {}
    for index in range(spec.num_hidden_layers):
        layer = _Layer(weights, adapters, scale, spec, stop, f"layers.{index}")
        u = layer.norm("input_layernorm", x, spec.rms_norm_eps)
        queries = layer.norm("self_attn.q_a_layernorm", layer.linear("self_attn.q_a_proj", u), spec.q_a_norm_eps)
        if spec.indexer_types[index] == FULL:
            mask = selected[index] = select(index_scores(layer, u, queries), spec.index_topk)
        x = x + _attention(layer, u, queries, mask)
        u = layer.norm("post_attention_layernorm", x, spec.rms_norm_eps)
        if index < spec.first_k_dense_replace:
            x = x + _mlp(layer, "mlp", u)
        else:
            y, routed[index] = _experts(layer, u)
            x = x + y + _mlp(layer, "mlp.shared_experts", u)
    return Trace(_norm(x, weights["model.norm.weight"], spec.rms_norm_eps), selected, routed)


def logits(
    weights: Weights, ids: Int[Array, "T"], spec: Glm52Spec, adapters: Adapters = NO_ADAPTERS, scale: Scalar = 0.0,
    stop: Stop = 0,
) -> Float[Array, "T V"]:
    """Entry t scores the token after ids[t]. At least float32, whatever the weights are."""
    return _wide(trace(weights, ids, spec, adapters, scale, stop).hidden @ weights["lm_head.weight"].T)


def logprobs(
    weights: Weights, ids: Int[Array, "T"], spec: Glm52Spec, adapters: Adapters = NO_ADAPTERS, scale: Scalar = 0.0,
    stop: Stop = 0, temperature: Scalar = 1.0,
) -> Float[Array, "T-1"]:
    """Entry t is log p(ids[t+1] | ids[:t+1]), in nats, of the logits divided by `temperature`."""
    scores = jax.nn.log_softmax(logits(weights, ids, spec, adapters, scale, stop)[:-1] / temperature)
    return jnp.take_along_axis(scores, ids[1:, None], axis=-1)[:, 0]


def parameter_shapes(spec: Glm52Spec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its name on disk. The published one also has a prediction layer, `model.layers.78`."""
    D, V = spec.hidden_size, spec.vocab_size
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for index in range(spec.num_hidden_layers):
        layer = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,), **_attention_shapes(spec)}
        if spec.indexer_types[index] == FULL:
            layer |= _indexer_shapes(spec)
        layer |= _mlp_shapes("mlp", D, spec.intermediate_size) if index < spec.first_k_dense_replace else _expert_shapes(spec)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(spec: Glm52Spec) -> dict[str, tuple[int, ...]]:
    D, H, Q, L = spec.hidden_size, spec.num_attention_heads, spec.q_lora_rank, spec.kv_lora_rank
    shapes = {"q_a_proj": (Q, D), "q_a_layernorm": (Q,), "q_b_proj": (H * spec.qk_head_dim, Q), "kv_a_layernorm": (L,),
              "kv_a_proj_with_mqa": (spec.latent_dim, D), "kv_b_proj": (H * (spec.qk_nope_head_dim + spec.v_head_dim), L),
              "o_proj": (D, H * spec.v_head_dim)}
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _indexer_shapes(spec: Glm52Spec) -> dict[str, tuple[int, ...]]:
    D, H, d = spec.hidden_size, spec.index_n_heads, spec.index_head_dim
    shapes = {"wq_b.weight": (H * d, spec.q_lora_rank), "wk.weight": (d, D), "k_norm.weight": (d,), "k_norm.bias": (d,),
              "weights_proj.weight": (H, D)}
    return {f"self_attn.indexer.{name}": shape for name, shape in shapes.items()}


def _expert_shapes(spec: Glm52Spec) -> dict[str, tuple[int, ...]]:
    D, E, inner = spec.hidden_size, spec.n_routed_experts, spec.moe_intermediate_size
    shapes = {"mlp.gate.weight": (E, D), "mlp.gate.e_score_correction_bias": (E,)}
    shapes |= _mlp_shapes("mlp.shared_experts", D, inner * spec.n_shared_experts)
    for expert in range(E):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", D, inner)
    return shapes


def _mlp_shapes(prefix: str, outer: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}.weight": (outer, inner) if name == "down_proj" else (inner, outer) for name in _MLP}


def _check(ids: Array, spec: Glm52Spec, adapters: Adapters, stop: Stop) -> None:
    # A misspelt adapter would otherwise be left out in silence, and an oracle must not agree by accident.
    linear = {name.removeprefix("model.").removesuffix(".weight") for name, shape in parameter_shapes(spec).items()
              if name.startswith("model.layers.") and len(shape) == 2 and not name.endswith(".mlp.gate.weight")}
    unknown = sorted(adapters.keys() - linear)
    if unknown:
        raise InputError(f"adapter {unknown[0]!r} names no linear layer of the model; wanted a name like 'layers.0.mlp.up_proj'")
    if isinstance(stop, int) and not 0 <= stop <= ids.shape[0]:
        raise InputError(f"stop is {stop} for a sequence of {ids.shape[0]} tokens; wanted 0 <= stop <= its length")


@dataclass(frozen=True)
class _Layer:
    """One layer's view of the weights and adapters, by the names that follow `model.layers.N.`"""

    weights: Weights
    adapters: Adapters
    scale: Scalar
    spec: Glm52Spec
    stop: Stop
    prefix: str

    def weight(self, name: str) -> Array:
        return self.weights[f"model.{self.prefix}.{name}"]

    def norm(self, name: str, x: Array, eps: float) -> Array:
        return _norm(x, self.weight(f"{name}.weight"), eps)

    def linear(self, name: str, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        y = x @ self.weight(f"{name}.weight").T
        if f"{self.prefix}.{name}" not in self.adapters:
            return y
        down, up = self.adapters[f"{self.prefix}.{name}"]
        return (y + self.scale * ((x @ down.T) @ up.T)).astype(y.dtype)

    def every_expert(self, name: str, x: Float[Array, "E T i"]) -> Float[Array, "E T o"]:
        """`linear` of each routed expert's projection `name`."""
        names = [f"mlp.experts.{expert}.{name}" for expert in range(self.spec.n_routed_experts)]
        y = jnp.einsum("eti,eoi->eto", x, jnp.stack([self.weight(f"{name}.weight") for name in names]))
        pairs = [self.adapters.get(f"{self.prefix}.{name}") for name in names]
        some = next((pair for pair in pairs if pair), None)
        if some is None:
            return y
        nothing = tuple(jnp.zeros_like(matrix) for matrix in some)
        down, up = (jnp.stack(side) for side in zip(*(pair or nothing for pair in pairs), strict=True))
        return (y + self.scale * jnp.einsum("etr,eor->eto", jnp.einsum("eti,eri->etr", x, down), up)).astype(y.dtype)


def _mlp(layer: _Layer, name: str, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    gate, up = (layer.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
    return layer.linear(f"{name}.down_proj", jax.nn.silu(gate) * up)


def _experts(layer: _Layer, x: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], Int[Array, "T K"]]:
    """(The routed experts' weighted sum, the experts of each token). No token is dropped. `GlmMoeDsaExperts`."""
    experts, shares = _route(layer, x)
    each = jnp.broadcast_to(x[None], (layer.spec.n_routed_experts, *x.shape))
    inner = jax.nn.silu(layer.every_expert("gate_proj", each)) * layer.every_expert("up_proj", each)
    y = layer.every_expert("down_proj", inner)
    sent = jax.nn.one_hot(experts, layer.spec.n_routed_experts, dtype=shares.dtype)
    return jnp.einsum("tke,tk,etd->td", sent, shares, _wide(y)).astype(x.dtype), experts


def _route(layer: _Layer, x: Float[Array, "T D"]) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """(Experts, their weights). The correction bias decides which are chosen, and not how much they count. `GlmMoeDsaTopkRouter`."""
    scores = jax.nn.sigmoid(_wide(x) @ _wide(layer.weight("mlp.gate.weight")).T)
    bias = _wide(layer.weight("mlp.gate.e_score_correction_bias"))[None]
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(scores + bias), layer.spec.num_experts_per_tok)
    shares = jnp.take_along_axis(scores, experts, axis=-1)
    shares = shares / (shares.sum(-1, keepdims=True) + 1e-20)
    return experts, layer.spec.routed_scaling_factor * shares


def _attention(
    layer: _Layer, x: Float[Array, "T D"], queries: Float[Array, "T Q"], selected: Bool[Array, "T T"]
) -> Float[Array, "T D"]:
    """Multi-head latent attention (DeepSeek-AI, 2024, section 2.1) to the selected positions. `GlmMoeDsaAttention`."""
    spec, tokens = layer.spec, x.shape[0]
    latent, key_rope = jnp.split(layer.linear("self_attn.kv_a_proj_with_mqa", x), [spec.kv_lora_rank], axis=-1)
    latent = _detach(layer.norm("self_attn.kv_a_layernorm", latent, spec.kv_a_norm_eps), layer.stop)
    key_rope = _detach(_rope(key_rope[:, None], spec), layer.stop)

    # Each head's rows hold the part without rotation first: of its query before the rotated part, of its key before the value.
    query = layer.linear("self_attn.q_b_proj", queries).reshape(tokens, spec.num_attention_heads, -1)
    query, query_rope = jnp.split(query, [spec.qk_nope_head_dim], axis=-1)
    expanded = layer.linear("self_attn.kv_b_proj", latent).reshape(tokens, spec.num_attention_heads, -1)
    key, value = jnp.split(expanded, [spec.qk_nope_head_dim], axis=-1)

    scores = jnp.einsum("thd,shd->hts", _wide(query), _wide(key))
    scores = scores + jnp.einsum("thd,sd->hts", _wide(_rope(query_rope, spec)), _wide(key_rope[:, 0]))
    scores = jnp.where(selected[None], scores * spec.qk_head_dim**-0.5, -jnp.inf)
    mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1), _wide(value)).astype(x.dtype)
    return layer.linear("self_attn.o_proj", mixed.reshape(tokens, -1))


def index_scores(layer: _Layer, x: Float[Array, "T D"], queries: Float[Array, "T Q"]) -> Float[Array, "T T"]:
    """[t, s] says how much token t wants to attend to s, for all s (DeepSeek-AI, 2025, eq. 1). `GlmMoeDsaIndexer`."""
    spec, tokens = layer.spec, x.shape[0]
    query = layer.linear("self_attn.indexer.wq_b", queries).reshape(tokens, spec.index_n_heads, -1)
    norm = (layer.weight(f"self_attn.indexer.k_norm.{part}") for part in ("weight", "bias"))
    key = _layer_norm(layer.linear("self_attn.indexer.wk", x), *norm, spec.index_k_norm_eps)
    query, key = (_wide(_rope_first(a, spec)) for a in (query, key[:, None]))
    weight = _wide(layer.linear("self_attn.indexer.weights_proj", x)) * spec.index_n_heads**-0.5
    matches = jax.nn.relu(jnp.einsum("thd,sd->ths", query, key[:, 0]) * spec.index_head_dim**-0.5)
    return jax.lax.stop_gradient(jnp.einsum("th,ths->ts", weight, matches))


def select(scores: Float[Array, "T T"], count: int) -> Bool[Array, "T T"]:
    """Of the positions s <= t the `count` with the highest scores[t, s], equal scores from the lowest position on."""
    tokens = scores.shape[0]
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    scores = jnp.where(scores == 0, 0, scores)  # -0.0 is no less than 0.0
    _, best = jax.lax.top_k(jnp.where(causal, scores, -jnp.inf), min(count, tokens))  # of equals, the lowest index
    return jnp.zeros_like(causal).at[jnp.arange(tokens)[:, None], best].set(True) & causal


def _rope_first(x: Float[Array, "T H d"], spec: Glm52Spec) -> Float[Array, "T H d"]:
    """The indexer's order: the rotated dimensions come first."""
    turned, rest = jnp.split(x, [spec.qk_rope_head_dim], axis=-1)
    return jnp.concatenate([_rope(turned, spec), rest], axis=-1)


def _rope(x: Float[Array, "T H r"], spec: Glm52Spec) -> Float[Array, "T H r"]:
    """Rotates dimensions 2j and 2j + 1 by position * theta^(-2j/r) (Su et al., 2021).

    Returns all first ones, then all second ones, as transformers does: the order is that of rotated keys in a state.
    """
    dtype = _wide(x).dtype
    frequency = jnp.asarray(1 / spec.rope_theta ** (np.arange(0, x.shape[-1], 2, dtype=dtype) / x.shape[-1]), dtype)
    angle = jnp.arange(x.shape[0], dtype=dtype)[:, None, None] * frequency[None, None]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    """`GlmMoeDsaRMSNorm`: a plain weight, multiplied after the cast."""
    wide = _wide(x)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return _channels(weight, x) * wide.astype(x.dtype)


def _layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Ba et al., 2016."""
    wide = _wide(x) - jnp.mean(_wide(x), axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * _channels(_wide(weight), x) + _channels(_wide(bias), x)).astype(x.dtype)


def _channels(weight: Float[Array, "C"], x: Float[Array, "... C"]) -> Array:
    """The weight in x's rank, so that nothing here depends on implicit rank promotion."""
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def _detach(x: Float[Array, "T ..."], stop: Stop) -> Float[Array, "T ..."]:
    held = jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1)) < stop
    return jnp.where(held, jax.lax.stop_gradient(x), x)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
