"""What all families' models do alike: from a Flax module to described parameters, adapters, and the vocabulary's two ends."""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models.base import Parameter, Segment, Tree
from longstraw_jax.models.layers.declare import Fixed
from longstraw_jax.models.layers.linear import Adapter, Linear
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.stacked import add_entry
from longstraw_jax.sharding import Owners, PlacementRules

WEIGHTS = ("plain", "nf4")


class FamilyModel:
    """Base of the families' frozen dataclasses. Their module has `embed_tokens`, `norm`, `lm_head` and stacks of layers.

    `lora` None trains every parameter but the `Fixed` ones; all are then held in the statistics dtype and cast where they are used.
    """

    owners: Owners
    dtype: str
    lora: LoraConfig | None
    sizes: BlockSizes
    weights: str
    """How the frozen matrices of the blocks' linear layers are held: "plain", or "nf4"."""

    linear_layers: tuple[str, ...]
    """Last parts of the linear layers' names: what adapters may sit on."""
    parts: tuple[str, ...]
    """Parts of the module that a walk binds one entry at a time."""
    expert_owners: Owners | None = None
    """Those along the mesh axis that experts are dealt to, in a family that has some."""

    @property
    def stacks(self) -> dict[str, np.ndarray]:
        """Of each stacked part: the first part of every entry's checkpoint name."""
        raise NotImplementedError

    def make_module(self) -> nnx.Module:
        """The parameters, stacked; only ever evaluated abstractly."""
        raise NotImplementedError

    def check_options(self) -> None:
        """Raises where the adapter's targets are no linear layers, or weights cannot be held as asked."""
        if self.weights not in WEIGHTS:
            raise InputError(f"weights are {self.weights!r}; wanted one of {', '.join(WEIGHTS)}")
        if self.weights == "nf4" and self.lora is None:
            raise InputError("weights in NF4 cannot be trained, and trainable is 'all'; wanted adapters, or plain weights")
        for target in self.lora.targets if self.lora else ():
            if target not in self.linear_layers:
                raise InputError(f"lora target {target!r} is no linear layer of the blocks; wanted some of {', '.join(self.linear_layers)}")

    @property
    def vocabulary(self) -> int:
        return self.spec.vocab_size

    @property
    def max_positions(self) -> int:
        return self.spec.max_position_embeddings

    @property
    def parameter_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype) if self.lora else statistics_dtype(self.dtype)

    def lora_of(self, name: str) -> LoraConfig | None:
        """The adapter of linear layers of that name, if they are a target."""
        return self.lora if self.lora and name in (self.lora.targets or self.linear_layers) else None

    def linear_options(self, name: str) -> dict:
        """How linear layers of that name are held, and their adapter."""
        return dict(dtype=self.parameter_dtype, lora=self.lora_of(name), packed=self.weights == "nf4")

    def linear(self, name: str, features_in: int, features_out: int) -> Linear:
        """A linear layer of the blocks, with an adapter where its name is a target."""
        return Linear(features_in, features_out, **self.linear_options(name))

    @cached_property
    def _module(self) -> nnx.Module:
        return nnx.eval_shape(self.make_module)

    def _divide(self, module: nnx.Module):
        """(graph, trainable, frozen) of a module or of one of its parts."""
        return nnx.split(module, Adapter if self.lora else nnx.All(nnx.Param, nnx.Not(Fixed)), ...)

    @cached_property
    def graphs(self) -> dict[str, nnx.GraphDef]:
        """Structure of each part; with a slice of its parameters `nnx.merge` gives the layer."""
        return {name: self._divide(getattr(self._module, name))[0] for name in self.parts}

    @cached_property
    def _parameters(self) -> tuple[Tree, Tree]:
        _, trainable, frozen = self._divide(self._module)
        return self._describe(trainable), self._describe(frozen)

    def abstract_parameters(self) -> tuple[Tree, Tree]:
        return self._parameters

    def _describe(self, state: nnx.State) -> Tree:
        rules, described, stacks = PlacementRules(self.owners, self.expert_owners), {}, self.stacks
        for path, variable in nnx.to_flat_state(state):
            spec = rules.spec(variable.shape, variable.get_metadata("axes"))
            stack = stacks.get(path[0])
            packed = variable.get_metadata("packed")
            name = ".".join((path if stack is None else path[1:])[: -1 if packed else None])
            here = described
            for part in path[:-1]:
                here = here.setdefault(part, {})
            here[path[-1]] = Parameter(
                variable.shape, np.dtype(variable.dtype), spec, stack, name, variable.get_metadata("init"), packed)
        return described

    def bind(self, part: str, trainable: Tree, frozen: Tree) -> nnx.Module:
        """The module of a part from its (sliced) parameters."""
        return nnx.merge(self.graphs[part], trainable, frozen)

    def embed(self, trainable: Tree, frozen: Tree, segment: Segment) -> Float[Array, "T D"]:
        """The segment's tokens, as the first layer takes them."""
        embed = self.bind("embed_tokens", trainable.get("embed_tokens", {}), frozen.get("embed_tokens", {}))
        return embed(segment.ids, segment.valid(), self.owners, self.dtype)

    def pull_embed(self, trainable: Tree, segment: Segment, cotangent: Float[Array, "T D"], gradient: Tree) -> Tree:
        """The transpose of `embed`: `gradient` grown, where the embedding is trained."""
        if "embed_tokens" not in gradient:
            return gradient
        embed_bar, = jax.vjp(lambda p: self.embed({"embed_tokens": p}, {}, segment), trainable["embed_tokens"])[1](cotangent)
        return {**gradient, "embed_tokens": add_entry(gradient["embed_tokens"], embed_bar)}

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

    def base_and_adapters(self, weights: dict) -> tuple[dict, dict, float]:
        """(base weights, adapters' (A, B) by module, their scale): how the plain references take what `weights` holds by name."""
        base = {name: x for name, x in weights.items() if not name.endswith((".lora_A", ".lora_B"))}
        modules = [name.removesuffix(".lora_A") for name in weights if name.endswith(".lora_A")]
        adapters = {m.removeprefix("model."): (weights[m + ".lora_A"], weights[m + ".lora_B"]) for m in modules}
        return base, adapters, self.lora.scale if self.lora else 0.0
