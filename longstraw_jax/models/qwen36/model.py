"""Qwen3.6 as one Flax module: layers stacked by type, [periods, GDN layers per period, ...] and [periods, ...].

Grouped by type, a scan's body only indexes leading dimensions; a stack over all layers would have to be sliced inside the
body, and the slices would be kept as copies of the whole stack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models.base import Parameter, Tree
from longstraw_jax.models.layers.linear import Adapter, Linear
from longstraw_jax.models.layers.norms import ZeroCentredNorm
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.stacked import add_entry
from longstraw_jax.models.layers.vocabulary import Embedding, Head
from longstraw_jax.models.qwen36 import reference, walk, weights
from longstraw_jax.models.qwen36.attention import AttentionLayer
from longstraw_jax.models.qwen36.gdn import GdnLayer, HeadShards
from longstraw_jax.models.qwen36.spec import Qwen36Spec, spec_to_hf
from longstraw_jax.sharding import Owners, PlacementRules

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
class Qwen36Model:
    """The family's `Model` (see models.base): a spec on a number of owners.

    `lora` None trains every parameter, which are then held in the statistics dtype and cast where they are used.
    """

    spec: Qwen36Spec
    owners: Owners
    dtype: str = "bfloat16"
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    sizes: BlockSizes = field(default_factory=BlockSizes)

    def __post_init__(self):
        HeadShards(self.spec, self.owners.count)  # refuses a degree that the recurrence cannot take
        for target in self.lora.targets if self.lora else ():
            if target not in LINEAR_LAYERS:
                raise InputError(f"lora target {target!r} is no linear layer of the blocks; wanted some of {', '.join(LINEAR_LAYERS)}")

    @property
    def vocabulary(self) -> int:
        return self.spec.vocab_size

    @property
    def checkpoint_prefixes(self) -> dict[str, str]:
        return weights.PREFIXES

    @property
    def checkpoint_ignored(self) -> tuple[str, ...]:
        return weights.IGNORED

    @property
    def max_positions(self) -> int:
        return self.spec.max_position_embeddings

    @property
    def parameter_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype) if self.lora else statistics_dtype(self.dtype)

    @property
    def layer_numbers(self) -> dict[str, np.ndarray]:
        """Layer number of every entry of each stack."""
        numbers = np.arange(self.spec.num_hidden_layers).reshape(self.spec.periods, -1)
        return {"gdn": numbers[:, :-1], "attention": numbers[:, -1]}

    def linear(self, name: str, features_in: int, features_out: int) -> Linear:
        """A linear layer of the blocks, with an adapter where its name is a target."""
        lora = self.lora if self.lora and name in (self.lora.targets or LINEAR_LAYERS) else None
        return Linear(features_in, features_out, dtype=self.parameter_dtype, lora=lora)

    @cached_property
    def _module(self) -> Qwen36:
        return nnx.eval_shape(lambda: Qwen36(self))

    def _divide(self, module: nnx.Module):
        """(graph, trainable, frozen) of a module or of one of its parts."""
        return nnx.split(module, Adapter if self.lora else nnx.Param, ...)

    @cached_property
    def graphs(self) -> dict[str, nnx.GraphDef]:
        """Structure of each part; with a slice of its parameters `nnx.merge` gives the layer."""
        return {name: self._divide(getattr(self._module, name))[0] for name in ("embed_tokens", "gdn", "attention", "norm", "lm_head")}

    @cached_property
    def _parameters(self) -> tuple[Tree, Tree]:
        _, trainable, frozen = self._divide(self._module)
        return self._describe(trainable), self._describe(frozen)

    def abstract_parameters(self) -> tuple[Tree, Tree]:
        return self._parameters

    def _describe(self, state: nnx.State) -> Tree:
        rules, described = PlacementRules(self.owners), {}
        for path, variable in nnx.to_flat_state(state):
            spec = rules.spec(variable.shape, variable.get_metadata("axes"))
            layers = self.layer_numbers.get(path[0])
            name = ".".join(path if layers is None else path[1:])
            here = described
            for part in path[:-1]:
                here = here.setdefault(part, {})
            here[path[-1]] = Parameter(
                variable.shape, np.dtype(variable.dtype), spec, layers, name, variable.get_metadata("init"))
        return described

    def bind(self, part: str, trainable: Tree, frozen: Tree) -> nnx.Module:
        """The module of a part from its (sliced) parameters."""
        return nnx.merge(self.graphs[part], trainable, frozen)

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

    def extend(self, trainable, frozen, branch, segment, *, stored=False):
        return walk.extend(self, trainable, frozen, branch, segment, stored)

    def pull(self, trainable, frozen, branch, segment, kept, hidden, cotangent, gradient):
        return walk.pull(self, trainable, frozen, branch, segment, kept, hidden, cotangent, gradient)

    def logprobs(self, trainable, frozen, hidden, targets, temperature):
        norm, head = (self.bind(part, trainable.get(part, {}), frozen.get(part, {})) for part in ("norm", "lm_head"))
        return head.logprobs(norm(hidden), targets, self.owners, self.sizes.logits, temperature)

    def pull_logprobs(self, trainable, frozen, hidden, targets, lse, cotangent, gradient, temperature):
        normed, pull_norm = jax.vjp(lambda p, x: self.bind("norm", p, frozen.get("norm", {}))(x), trainable.get("norm", {}), hidden)
        head = self.bind("lm_head", trainable.get("lm_head", {}), frozen.get("lm_head", {}))
        grown = gradient.get("lm_head", {}).get("weight")
        normed_bar, grown = head.pull(normed, targets, lse, cotangent, self.owners, self.sizes.logits, temperature, grown)
        norm_bar, hidden_bar = pull_norm(normed_bar)
        if grown is not None:
            gradient = {**gradient, "lm_head": {"weight": grown}, "norm": add_entry(gradient["norm"], norm_bar)}
        return hidden_bar, gradient

    def hf_config(self):
        return spec_to_hf(self.spec)

    def reference_logprobs(self, weights, ids, stop):
        base = {name: x for name, x in weights.items() if not name.endswith((".lora_A", ".lora_B"))}
        modules = [name.removesuffix(".lora_A") for name in weights if name.endswith(".lora_A")]
        adapters = {m.removeprefix("model."): (weights[m + ".lora_A"], weights[m + ".lora_B"]) for m in modules}
        return reference.logprobs(base, ids, self.spec, adapters, self.lora.scale if self.lora else 0.0, stop)
