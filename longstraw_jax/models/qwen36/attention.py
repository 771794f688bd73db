"""The full-attention layer of Qwen3.6 (transformers, modeling_qwen3_5.Qwen3_5Attention): gated grouped-query attention.

Split in two around the attention itself, because rows are written between the halves and because the attention's backward
pass adds into page buffers, which no automatic transpose of the whole layer could.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.models.base import Segment
from longstraw_jax.models.layers.mlp import GatedMlp
from longstraw_jax.models.layers.norms import ZeroCentredNorm
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.rope import rotate_half_split
from longstraw_jax.models.qwen36.spec import Qwen36Spec


class Projections(NamedTuple):
    """What a token brings to the attention; keys and values become page rows."""

    q: Float[Array, "T H D"]
    gate: Float[Array, "T H D"]
    k: Float[Array, "T KV D"]
    v: Float[Array, "T KV D"]


class SelfAttention(nnx.Module):
    """Parameters only; names are the checkpoint's."""

    def __init__(self, spec: Qwen36Spec, linear, *, dtype):
        width = spec.num_attention_heads * spec.head_dim
        self.q_proj = linear("q_proj", spec.hidden_size, 2 * width)
        self.k_proj = linear("k_proj", spec.hidden_size, spec.num_key_value_heads * spec.head_dim)
        self.v_proj = linear("v_proj", spec.hidden_size, spec.num_key_value_heads * spec.head_dim)
        self.o_proj = linear("o_proj", width, spec.hidden_size)
        self.q_norm = ZeroCentredNorm(spec.head_dim, spec.rms_norm_eps, dtype=dtype)
        self.k_norm = ZeroCentredNorm(spec.head_dim, spec.rms_norm_eps, dtype=dtype)


class AttentionLayer(nnx.Module):
    def __init__(self, spec: Qwen36Spec, linear, *, dtype):
        self.spec = spec
        self.input_layernorm = ZeroCentredNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.self_attn = SelfAttention(spec, linear, dtype=dtype)
        self.post_attention_layernorm = ZeroCentredNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMlp(spec.hidden_size, spec.intermediate_size, linear)

    def project(self, x: Float[Array, "T M"], segment: Segment) -> Projections:
        """Queries and keys normed, then rotated; each head's projection holds its query first and its gate second."""
        spec, attn, owners, tokens = self.spec, self.self_attn, segment.owners, x.shape[0]
        u = self.input_layernorm(x)
        both = attn.q_proj(u, owners).reshape(tokens, spec.num_attention_heads, 2 * spec.head_dim)
        q, gate = both[..., : spec.head_dim], both[..., spec.head_dim :]
        k = attn.k_proj(u, owners).reshape(tokens, spec.num_key_value_heads, spec.head_dim)
        v = attn.v_proj(u, owners).reshape(tokens, spec.num_key_value_heads, spec.head_dim)
        positions = segment.positions()
        q, k = (rotate_half_split(y, positions, spec.rotary_dim, spec.rope_theta) for y in (attn.q_norm(q), attn.k_norm(k)))
        return Projections(q, gate, *(segment.hold(y, positions) for y in (k, v)))

    def finish(
        self, x: Float[Array, "T M"], out: Float[Array, "T H D"], gate: Float[Array, "T H D"], segment: Segment
    ) -> Float[Array, "T M"]:
        """Sigmoid gate, output projection, feed-forward block."""
        wide = statistics_dtype(x.dtype)
        gated = (out.astype(wide) * jax.nn.sigmoid(gate.astype(wide))).astype(x.dtype)
        h = x + self.self_attn.o_proj(gated.reshape(x.shape[0], -1), segment.owners)
        return h + self.mlp(self.post_attention_layernorm(h), segment.owners)
