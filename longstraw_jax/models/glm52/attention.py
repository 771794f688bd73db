"""GLM-5.2's multi-head latent attention and its indexer (transformers, modeling_glm_moe_dsa.GlmMoeDsaAttention, .Indexer).

Absorbed form (DeepSeek-V2, Liu et al., 2024, section 2.1): keys and values are never formed. A query is carried into the
latent space by its head's key matrix, attends to the rows [latent | rotated key] that pages hold, and what it reads there is
carried out by the head's value matrix. The layer is split around the attention, whose backward pass adds into page buffers.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.models.base import Segment
from longstraw_jax.models.glm52.spec import Glm52Spec
from longstraw_jax.models.layers.declare import Fixed
from longstraw_jax.models.layers.linear import Linear
from longstraw_jax.models.layers.norms import LayerNorm, Norm
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.rope import rotate_interleaved
from longstraw_jax.sharding import Owners


class HeadProjection(Linear):
    """`kv_b_proj`, [H, nope + value, latent]: each head's matrices from the latent to its keys and to its values."""

    def __init__(self, heads: int, keys: int, values: int, latent: int, **options):
        super().__init__(latent, heads * (keys + values), **options)
        self.heads, self.keys = heads, keys

    def _by_head(self, owners: Owners, dtype, part: slice):
        """The weight's rows of every head's `part`, and those of the adapter's B."""
        weight = self.matrix(owners, dtype)
        low = None if self.scale is None else self.lora_B[...].astype(dtype)
        return [None if w is None else w.reshape(self.heads, -1, w.shape[-1])[:, part] for w in (weight, low)]

    def absorb(self, q: Float[Array, "T H nope"], owners: Owners) -> Float[Array, "T H latent"]:
        """q^T W_k: scores with it and a latent are scores with the query and that latent's key."""
        weight, low = self._by_head(owners, q.dtype, slice(self.keys))
        y = jnp.einsum("thd,hdl->thl", q, weight)
        if low is None:
            return y
        y_low = jnp.einsum("thr,rl->thl", jnp.einsum("thd,hdr->thr", q, low), self.lora_A[...].astype(q.dtype))
        return y + y_low * jnp.asarray(self.scale, q.dtype)

    def values(self, read: Float[Array, "T H latent"], owners: Owners) -> Float[Array, "T H value"]:
        """W_v times what was read from the latents."""
        weight, low = self._by_head(owners, read.dtype, slice(self.keys, None))
        y = jnp.einsum("thl,hvl->thv", read, weight)
        if low is None:
            return y
        y_low = jnp.einsum("thr,hvr->thv", jnp.einsum("thl,rl->thr", read, self.lora_A[...].astype(read.dtype)), low)
        return y + y_low * jnp.asarray(self.scale, read.dtype)


class SelfAttention(nnx.Module):
    """Names are the checkpoint's."""

    def __init__(self, spec: Glm52Spec, linear, options_of, *, dtype):
        heads, width = spec.num_attention_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim
        self.q_a_proj = linear("q_a_proj", spec.hidden_size, spec.q_lora_rank)
        self.q_a_layernorm = Norm(spec.q_lora_rank, spec.q_a_norm_eps, dtype=dtype)
        self.q_b_proj = linear("q_b_proj", spec.q_lora_rank, heads * width)
        self.kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", spec.hidden_size, spec.kv_lora_rank + spec.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(spec.kv_lora_rank, spec.kv_a_norm_eps, dtype=dtype)
        self.kv_b_proj = HeadProjection(
            heads, spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank, **options_of("kv_b_proj"))
        self.o_proj = linear("o_proj", heads * spec.v_head_dim, spec.hidden_size)


class AttentionHalf(nnx.Module):
    """A layer up to its feed-forward part."""

    def __init__(self, spec: Glm52Spec, linear, options_of, *, dtype):
        self.spec = spec
        self.input_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.self_attn = SelfAttention(spec, linear, options_of, dtype=dtype)

    def project(self, x: Float[Array, "T M"], segment: Segment) -> tuple[Float[Array, "T H C"], Float[Array, "T C"]]:
        """(absorbed queries, the tokens' rows), both [latent | rotated]; a query's product with a row is its score, unscaled."""
        spec, attn, owners, positions = self.spec, self.self_attn, segment.owners, segment.positions()
        u, low = self._inputs(x, owners)
        q = attn.q_b_proj(low, owners).reshape(x.shape[0], spec.num_attention_heads, -1)
        nope, turned = q[..., : spec.qk_nope_head_dim], q[..., spec.qk_nope_head_dim :]
        turned = rotate_interleaved(turned, positions, spec.qk_rope_head_dim, spec.rope_theta)
        latent, key = jnp.split(attn.kv_a_proj_with_mqa(u, owners), [spec.kv_lora_rank], -1)
        key = rotate_interleaved(key[:, None], positions, spec.qk_rope_head_dim, spec.rope_theta)[:, 0]
        row = jnp.concatenate([attn.kv_a_layernorm(latent), key], -1)
        return jnp.concatenate([attn.kv_b_proj.absorb(nope, owners), turned], -1), segment.hold(row, positions)

    def _inputs(self, x, owners: Owners):
        """The normed hidden state, and the normed query latent, which the indexer reads too."""
        u = self.input_layernorm(x)
        return u, self.self_attn.q_a_layernorm(self.self_attn.q_a_proj(u, owners))

    def index_inputs(self, x: Float[Array, "T M"], segment: Segment) -> tuple[Float[Array, "T M"], Float[Array, "T Q"]]:
        """What the layer's indexer reads."""
        return self._inputs(x, segment.owners)

    def finish(self, x: Float[Array, "T M"], read: Float[Array, "T H L"], segment: Segment) -> Float[Array, "T M"]:
        """From what was read out of the latents to the residual stream."""
        out = self.self_attn.kv_b_proj.values(read, segment.owners)
        return x + self.self_attn.o_proj(out.reshape(x.shape[0], -1), segment.owners)


class Indexer(nnx.Module):
    """Scores every earlier token for every query (DeepSeek-V3.2, 2025, eq. 1). It takes no gradient, so nothing of it is trained."""

    def __init__(self, spec: Glm52Spec, *, dtype):
        self.spec = spec
        self.wq_b = Linear(spec.q_lora_rank, spec.index_n_heads * spec.index_head_dim, dtype=dtype, kind=Fixed)
        self.wk = Linear(spec.hidden_size, spec.index_head_dim, dtype=dtype, kind=Fixed)
        self.k_norm = LayerNorm(spec.index_head_dim, spec.index_k_norm_eps, dtype=dtype, kind=Fixed)
        self.weights_proj = Linear(spec.hidden_size, spec.index_n_heads, dtype=dtype, kind=Fixed)

    def keys(self, u: Float[Array, "T M"], segment: Segment) -> Float[Array, "T D"]:
        """Page rows, rotated on their first dimensions."""
        return self._rotate(self.k_norm(self.wk(u, segment.owners))[:, None], segment)[:, 0]

    def queries(
        self, u: Float[Array, "T M"], low: Float[Array, "T Q"], segment: Segment
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
        """(queries, weights of their heads): I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s] / sqrt(D))."""
        q = self.wq_b(low, segment.owners).reshape(u.shape[0], self.spec.index_n_heads, -1)
        wide = statistics_dtype(u.dtype)
        weights = self.weights_proj(u, segment.owners).astype(wide) * self.spec.index_n_heads**-0.5
        return self._rotate(q, segment), weights

    def _rotate(self, x, segment: Segment):
        return rotate_interleaved(x, segment.positions(), self.spec.qk_rope_head_dim, self.spec.rope_theta)
