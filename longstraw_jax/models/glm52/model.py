"""GLM-5.2 as one Flax module: layers stacked by their feed-forward part, indexers and routed experts in stacks of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.models.base import Tree
from longstraw_jax.models.family import FamilyModel
from longstraw_jax.models.glm52 import reference, walk
from longstraw_jax.models.glm52.attention import Indexer
from longstraw_jax.models.glm52.layers import DenseLayer, RoutedLayer
from longstraw_jax.models.glm52.spec import Glm52Spec, spec_to_hf
from longstraw_jax.models.layers.experts import ExpertLinear, ExpertPlan, Experts
from longstraw_jax.models.layers.norms import Norm
from longstraw_jax.models.layers.vocabulary import Embedding, Head
from longstraw_jax.sharding import Owners

LINEAR_LAYERS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What adapters may sit on; of the projections of feed-forward parts the dense, the shared and the routed experts' alike."""


_TILE = 512
"""Queries of all owners that are at work at once."""


class Glm52(nnx.Module):
    """The parameters. Never called: `walk` binds one layer at a time."""

    def __init__(self, model: Glm52Model):
        spec, dtype = model.spec, model.parameter_dtype
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self.norm = Norm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.lm_head = Head(spec.vocab_size, spec.hidden_size, dtype=dtype)

        def stacked(count, make):
            return nnx.vmap(lambda _: make())(jnp.arange(count))

        parts = spec, model.linear, model.linear_options
        self.dense = stacked(spec.first_k_dense_replace, lambda: DenseLayer(*parts, dtype=dtype))
        self.routed = stacked(spec.num_hidden_layers - spec.first_k_dense_replace, lambda: RoutedLayer(*parts, dtype=dtype))
        self.indexer = stacked(len(spec.full_layers), lambda: Indexer(spec, dtype=dtype))
        self.experts = stacked(
            spec.num_hidden_layers - spec.first_k_dense_replace,
            lambda: Experts(spec.n_routed_experts, spec.hidden_size, spec.moe_intermediate_size, model.expert_linear))


@dataclass(frozen=True)
class Glm52Model(FamilyModel):
    """The family's `Model` (see models.base): a spec on a mesh's owners.

    `lora` None trains every parameter but the indexers and the routers' balancing bias, which no gradient reaches.
    """

    spec: Glm52Spec
    owners: Owners
    expert_owners: Owners
    """Those along the mesh axis that experts are dealt to."""
    dtype: str = "bfloat16"
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    sizes: BlockSizes = field(default_factory=BlockSizes)
    memory: str = "device"
    weights: str = "plain"
    exchange: str = "auto"
    """How selected rows and queries meet: "rounds", "fetch", or by the segment's length."""
    expert_exchange: str = "gather"
    """How tokens get to their experts; see `ExpertPlan`."""

    linear_layers = LINEAR_LAYERS
    checkpoint_prefixes = {}
    parts = ("embed_tokens", "dense", "routed", "indexer", "norm", "lm_head")
    pulled_rows = ("latent",)

    @property
    def checkpoint_ignored(self) -> tuple[str, ...]:
        """The layer behind the last one predicts a further token."""
        return (f"model.layers.{self.spec.num_hidden_layers}.",)

    def __post_init__(self):
        self.check_options()

    def make_module(self) -> nnx.Module:
        return Glm52(self)

    def expert_linear(self, name: str, experts: int, features_in: int, features_out: int) -> ExpertLinear:
        return ExpertLinear(experts, features_in, features_out, **self.linear_options(name))

    @cached_property
    def plan(self) -> ExpertPlan:
        """How the routed experts are laid out."""
        spec, axes = self.spec, tuple(axis for axis in self.owners.axes if axis not in self.expert_owners.axes)
        context = Owners(axes, self.owners.count // self.expert_owners.count)
        return ExpertPlan(context, self.expert_owners, spec.n_routed_experts, spec.hidden_size, spec.moe_intermediate_size,
                          self.lora.scale if self.lora else 0.0, self.sizes.queries, self.sizes.queries, self.expert_exchange)

    @cached_property
    def tile_sizes(self) -> BlockSizes:
        """Selection and attention take tiles of all owners' queries, whose rows are as wide as all heads' latents: few at a time."""
        return replace(self.sizes, queries=max(1, min(self.sizes.queries, _TILE // self.owners.count)))

    def layers_of(self, kind: str) -> np.ndarray:
        """Numbers of the layers of one kind, ascending."""
        dense = self.spec.first_k_dense_replace
        return np.arange(dense) if kind == "dense" else np.arange(dense, self.spec.num_hidden_layers)

    @cached_property
    def index_layers(self) -> tuple[np.ndarray, np.ndarray]:
        """Per layer: whether it selects anew, and which of the full-index layers its selection is from."""
        full = np.array([i in self.spec.full_layers for i in range(self.spec.num_hidden_layers)])
        return full, np.cumsum(full) - 1

    @property
    def stacks(self) -> dict[str, np.ndarray]:
        """Where the entries of each stack stand in the checkpoint."""
        def names(layers, rest=""):
            return np.array([f"layers.{i}.{rest}" for i in layers], object)

        experts = np.array([[f"{layer}mlp.experts.{e}." for e in range(self.spec.n_routed_experts)]
                            for layer in names(self.layers_of("routed"))], object)
        return {"dense": names(self.layers_of("dense")), "routed": names(self.layers_of("routed")), "experts": experts,
                "indexer": names(self.spec.full_layers, "self_attn.indexer.")}

    def abstract_rows(self, granules: int, granule: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Latents with their rotated keys, of every layer, and index keys of the full-index layers."""
        spec = self.spec
        shapes = {"latent": (spec.num_hidden_layers, spec.kv_lora_rank + spec.qk_rope_head_dim),
                  "index": (len(spec.full_layers), spec.index_head_dim)}
        return {name: jax.ShapeDtypeStruct((layers, granules, granule, width), self.dtype) for name, (layers, width) in shapes.items()}

    def abstract_recurrent(self) -> tuple[Tree, Tree]:
        return {}, {}

    def extend(self, trainable, frozen, branch, segment, *, stored=False, choices=None):
        return walk.extend(self, trainable, frozen, branch, segment, stored, choices)

    def pull(self, trainable, frozen, branch, segment, kept, hidden, cotangent, gradient):
        return walk.pull(self, trainable, frozen, branch, segment, kept, hidden, cotangent, gradient)

    def abstract_choices(self, tokens):
        """What each full-index layer's tokens select, and where each routed layer's go."""
        spec = self.spec
        shapes = {"selection": (len(spec.full_layers), tokens, spec.index_topk),
                  "routing": (len(self.layers_of("routed")), tokens, spec.num_experts_per_tok)}
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}

    def choices(self, kept):
        return kept["choices"]

    def hf_config(self):
        return spec_to_hf(self.spec)

    def reference_logprobs(self, weights, ids, stop):
        base, adapters, scale = self.base_and_adapters(weights)
        return reference.logprobs(base, ids, self.spec, adapters, scale, stop)
