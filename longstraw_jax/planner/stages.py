"""A step's stages as the programs that training runs, with abstract arguments: nothing in here is written for the planner alone
but the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from longstraw_jax.capture import capture_pages, capture_program, chunk_tokens
from longstraw_jax.config import BlockSizes, GradientConfig, LoraConfig, OptimizerConfig
from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.members import Members, bucket, members_program
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Model, Tree
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.registry import Spec, make_model
from longstraw_jax.sharding import AnyMesh
from longstraw_jax.state import abstract_cotangent, abstract_state
from longstraw_jax.sweep import sweep_program
from longstraw_jax.update import abstract_optimizer_state, update_program


@dataclass(frozen=True)
class Workload:
    """One GRPO step on one group."""

    spec: Spec
    positions: int
    """Of the prompt and one response together."""
    response: int
    """Tokens of every response."""
    group: int
    gradient: GradientConfig = field(default_factory=GradientConfig)
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    sizes: BlockSizes = field(default_factory=BlockSizes)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: str = "bfloat16"
    weights: str = "plain"
    memory: str = "device"

    def __post_init__(self):
        for name, least in (("response", 1), ("group", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; wanted at least {least}")
        if self.gradient.measure_cosine:
            raise UnsupportedError("measuring the gradient's cosine holds a second cotangent, which is not planned for; wanted a plan "
                                   "without it")
        if self.prompt < 2:
            raise InputError(f"{self.positions} positions with a response of {self.response} leave a prompt of {self.prompt}; "
                             "wanted at least 2 tokens")

    @property
    def prompt(self) -> int:
        return self.positions - self.response

    @property
    def captured(self) -> int:
        return self.prompt - 1


@dataclass(frozen=True)
class Stage:
    """One program, called `calls` times in a step."""

    name: str
    jitted: Any
    arguments: tuple
    values: tuple
    """What is known of the arguments in an average call, as numbers; None elsewhere. Aligned with `arguments`."""
    calls: float
    inside: Sequence[str]
    """Parts of the step that are among the arguments."""
    beside: Sequence[str]
    """Parts that lie on the device or the host meanwhile without being arguments."""

    def known(self) -> list:
        """The values of all arrays among the arguments, one after the other."""
        return jax.tree.leaves(jax.tree.map(
            lambda value, part: [value] if value is not None else [None] * len(jax.tree.leaves(part)), self.values, self.arguments,
            is_leaf=lambda x: x is None), is_leaf=lambda x: x is None)


@dataclass(frozen=True)
class Step:
    """The stages of a workload on a mesh, and the parts that it holds."""

    workload: Workload
    mesh: AnyMesh

    @cached_property
    def model(self) -> Model:
        w = self.workload
        return make_model(w.spec, self.mesh, dtype=w.dtype, lora=w.lora, sizes=w.sizes, memory=w.memory, weights=w.weights)

    @cached_property
    def chunk(self) -> int:
        return chunk_tokens(self.model, self.workload.captured)

    @property
    def chunks(self) -> int:
        return -(-self.workload.captured // self.chunk)

    @cached_property
    def swept(self) -> int:
        """Chunks that the sweep goes through."""
        reach = self.workload.gradient.reach(self.workload.captured)
        return self.chunks - reach // self.chunk if reach < self.workload.captured else 0

    @cached_property
    def parts(self) -> dict[str, Tree]:
        """Everything of any size, as shapes with placements."""
        trainable, frozen = (parameters.abstract_arrays(tree, self.mesh) for tree in self.model.abstract_parameters())
        rows, recurrent = abstract_state(self.model, self.mesh, capture_pages(self.model, self.workload.captured))
        parts = {"weights": frozen, "trainable": trainable, "optimizer": abstract_optimizer_state(self.workload.optimizer, trainable),
                 "gradient": trainable, "pages": rows, "recurrent": recurrent}
        if self.swept:
            parts["cotangent"] = abstract_cotangent(self.model, (rows, recurrent))
            host = self.workload.gradient.entry_states == "host"
            entries = jax.tree.map(lambda x: self._entries(x, host), recurrent)
            parts |= {"entries": entries} if entries else {}
        return parts

    def _entries(self, x: jax.ShapeDtypeStruct, host: bool) -> jax.ShapeDtypeStruct:
        """A recurrent array once for every chunk that is swept."""
        spec = PartitionSpec(None, *x.sharding.spec)
        placed = NamedSharding(self.mesh, spec, memory_kind="pinned_host" if host else "device")
        return jax.ShapeDtypeStruct((self.swept, *x.shape), x.dtype, sharding=placed)

    def held(self, names: Sequence[str]) -> dict[str, Tree]:
        """Those of the named parts that this step has."""
        return {name: self.parts[name] for name in names if jax.tree.leaves(self.parts.get(name, ()))}

    def stages(self) -> list[Stage]:
        swept = bool(self.swept)
        return [self.capture(), self.members("score", 0), self.members("replay", 1, swept), *([self.sweep()] if swept else []),
                self.update()]

    def capture(self) -> Stage:
        p, calls = self.parts, self.chunks
        ids = self._array((self.chunk,), jnp.int32, self.model.owners.spec)
        scalar = self._array((), jnp.int32)
        start = (calls - 1) / 2 * self.chunk  # the work grows linearly from call to call
        return Stage(
            "capture", capture_program(self.model, self.mesh).jitted,
            (p["trainable"], p["weights"], p["pages"], p["recurrent"], ids, scalar, scalar),
            (None, None, None, None, None, int(start), self.chunk), self.workload.captured / self.chunk,
            ("trainable", "weights", "pages", "recurrent"), ("optimizer", "entries"))

    def members(self, name: str, backward: int, to_prompt: bool = False) -> Stage:
        p, w = self.parts, self.workload
        wide = statistics_dtype(w.dtype)
        settings = dict.fromkeys(("clip_low", "clip_high", "kl_beta", "temperature"), self._array((), wide))
        boundary = p["cotangent"] if to_prompt else ()
        scalar = self._array((), jnp.int32)
        arguments = (p["trainable"], p["weights"], p["gradient"], boundary, p["pages"], p["recurrent"], scalar, self._members(), settings,
                     scalar)
        lengths = Members(**{**dict.fromkeys(vars(self._members())), "length": np.full(w.group, w.response, np.int32)})
        values = (None, None, None, None, None, None, w.captured, lengths, None, backward)
        inside = ["trainable", "weights", "gradient", "pages", "recurrent"] + (["cotangent"] if to_prompt else [])
        return Stage(
            name, members_program(self.model, self.mesh, to_prompt).jitted, arguments, values, 1, inside, ("optimizer", "entries"))

    def _members(self) -> Members:
        w = self.workload
        blocks, block = bucket(self.model, w.response)
        wide, tokens = statistics_dtype(w.dtype), PartitionSpec(None, None, self.model.owners.axes)

        def per_token(dtype):
            return self._array((w.group, blocks, block), dtype, tokens)

        def per_member(dtype):
            return self._array((w.group,), dtype)

        return Members(per_token(jnp.int32), per_token(jnp.int32), per_token(bool), per_token(wide), per_token(wide),
                       per_member(jnp.int32), per_member(wide), per_member(wide), per_member(bool))

    def sweep(self) -> Stage:
        p, calls = self.parts, self.swept
        ids = self._array((self.chunk,), jnp.int32, self.model.owners.spec)
        scalar = self._array((), jnp.int32)
        fixed = self.workload.gradient.reach(self.workload.captured)
        start = (self.chunks - calls + (calls - 1) / 2) * self.chunk
        arguments = (p["trainable"], p["weights"], p["gradient"], p["cotangent"], p["pages"], p["recurrent"], ids, scalar, scalar, scalar)
        return Stage("sweep", sweep_program(self.model, self.mesh).jitted, arguments,
                     (None,) * 7 + (int(start), self.chunk, fixed), (self.workload.captured - fixed) / self.chunk,
                     ("trainable", "weights", "gradient", "cotangent", "pages", "recurrent"), ("optimizer", "entries"))

    def update(self) -> Stage:
        p = self.parts
        return Stage("update", update_program(self.workload.optimizer), (p["trainable"], p["optimizer"], p["gradient"]),
                     (None, None, None), 1, ("trainable", "optimizer", "gradient"), ("weights",))

    def _array(self, shape: tuple[int, ...], dtype, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
        placed = NamedSharding(self.mesh, spec or PartitionSpec(), memory_kind="device")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
