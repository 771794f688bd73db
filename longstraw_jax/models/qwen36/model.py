"""Qwen3.6 as one Flax module: layers stacked by type, [periods, GDN layers per period, ...] and [periods, ...].

Grouped by type, a scan's body only indexes leading dimensions; a stack over all layers would have to be sliced inside the
body, and the slices would be kept as copies of the whole stack.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.models.base import Tree
from longstraw_jax.models.family import FamilyModel
from longstraw_jax.models.layers.norms import ZeroCentredNorm
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.vocabulary import Embedding, Head
from longstraw_jax.models.qwen36 import reference, walk
from longstraw_jax.models.qwen36.attention import AttentionLayer
from longstraw_jax.models.qwen36.gdn import GdnLayer, HeadShards
from longstraw_jax.models.qwen36.spec import Qwen36Spec, spec_to_hf
from longstraw_jax.models.qwen36.weights import IGNORED, PREFIXES
from longstraw_jax.sharding import Owners

LINEAR_LAYERS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
                 "gate_proj", "up_proj", "down_proj")


class Qwen36(nnx.Module):
    """The parameters. Never called: `walk` binds one layer at a time."""

    def __init__(self, model: Qwen36Model):
        spec, dtype = model.spec, model.parameter_dtype
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self.norm = ZeroCentredNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.lm_head = Head(spec.vocab_size, spec.hidden_size, dtype=dtype)
        periods = jnp.arange(spec.periods)
        self.attention = nnx.vmap(lambda _: AttentionLayer(spec, model.linear, dtype=dtype))(periods)
        layers = jnp.zeros((spec.periods, spec.recurrent_per_period))
        self.gdn = nnx.vmap(nnx.vmap(lambda _: GdnLayer(spec, model.linear, model.sizes.recurrence, dtype=dtype)))(layers)


@dataclass(frozen=True)
class Qwen36Model(FamilyModel):
    """The family's `Model` (see models.base): a spec on a number of owners."""

    spec: Qwen36Spec
    owners: Owners
    dtype: str = "bfloat16"
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    sizes: BlockSizes = field(default_factory=BlockSizes)
    memory: str = "device"
    weights: str = "plain"

    linear_layers = LINEAR_LAYERS
    checkpoint_prefixes = PREFIXES
    checkpoint_ignored = IGNORED
    parts = ("embed_tokens", "gdn", "attention", "norm", "lm_head")
    pulled_rows = ("k", "v")

    def __post_init__(self):
        HeadShards(self.spec, self.owners.count)  # refuses a degree that the recurrence cannot take
        self.check_options()

    @property
    def stacks(self) -> dict[str, np.ndarray]:
        layers = np.array([f"layers.{n}." for n in range(self.spec.num_hidden_layers)], object).reshape(self.spec.periods, -1)
        return {"gdn": layers[:, :-1], "attention": layers[:, -1]}

    def make_module(self) -> nnx.Module:
        return Qwen36(self)

    def abstract_rows(self, granules: int, granule: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Keys (normed and rotated) and values of the full-attention layers."""
        shape = (self.spec.periods, granules, granule, self.spec.num_key_value_heads, self.spec.head_dim)
        return dict.fromkeys(("k", "v"), jax.ShapeDtypeStruct(shape, self.dtype))

    def abstract_recurrent(self) -> tuple[Tree, Tree]:
        """`S` per value head and `tail`, the last pre-convolution inputs, both shared out by heads."""
        spec, shards = self.spec, HeadShards(self.spec, self.owners.count)
        lead = (spec.periods, spec.recurrent_per_period)
        heads = (spec.linear_num_value_heads, spec.linear_key_head_dim, spec.linear_value_head_dim)
        tail = (spec.linear_conv_kernel_dim - 1, self.owners.count * shards.channels)
        shapes = {"S": jax.ShapeDtypeStruct(lead + heads, statistics_dtype(self.dtype)),
                  "tail": jax.ShapeDtypeStruct(lead + tail, self.dtype)}
        return shapes, {"S": PartitionSpec(None, None, self.owners.axes), "tail": PartitionSpec(None, None, None, self.owners.axes)}

    def extend(self, trainable, frozen, branch, segment, *, stored=False, choices=None):
        return walk.extend(self, trainable, frozen, branch, segment, stored)

    def pull(self, trainable, frozen, branch, segment, kept, hidden, cotangent, gradient):
        return walk.pull(self, trainable, frozen, branch, segment, kept, hidden, cotangent, gradient)

    def abstract_choices(self, tokens):
        return {}

    def choices(self, kept):
        return {}

    def hf_config(self):
        return spec_to_hf(self.spec)

    def reference_logprobs(self, weights, ids, stop):
        base, adapters, scale = self.base_and_adapters(weights)
        return reference.logprobs(base, ids, self.spec, adapters, scale, stop)
