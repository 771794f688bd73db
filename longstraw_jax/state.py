"""The resident state: all that later tokens need of a captured prompt, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from longstraw_jax.errors import InputError
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Model, Tree
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.policy import Policy
from longstraw_jax.sharding import AnyMesh


@dataclass(frozen=True)
class Fingerprint:
    """What a state was captured from."""

    prompt: str
    """SHA-256 of the prompt's token ids."""
    parameters: str
    """The policy's version."""
    configuration: Model
    """Spec, owners, dtype, block sizes: the model object itself."""

    @classmethod
    def of(cls, policy: Policy, prompt_ids: np.ndarray) -> Fingerprint:
        return cls(prompt_digest(prompt_ids), policy.version, policy.model)


def prompt_digest(prompt_ids: np.ndarray) -> str:
    return hashlib.sha256(np.asarray(prompt_ids, np.int32).tobytes()).hexdigest()


@dataclass(frozen=True)
class EntryStates:
    """The recurrent state at the entry of captured chunks: where the prompt sweep starts each of them again."""

    chunk: int
    """Positions of a chunk."""
    states: dict[int, Tree]
    """By the chunk's first position."""


@dataclass(frozen=True)
class ResidentState:
    """z_P of a prompt of P tokens: positions 0 .. P-2, without any graph. Made by `capture` only."""

    rows: dict[str, jax.Array]
    """Page rows [layers, pages, page, ...] of the attention layers; pages are dealt to the owners in turn, device-major here."""
    recurrent: Tree
    """State of the recurrent layers after position P-2, shared out by heads."""
    length: int
    """Captured positions, P - 1."""
    last_token: int
    """prompt[-1]: the first input of every response."""
    fingerprint: Fingerprint
    entries: EntryStates | None = None
    """Kept where the gradient will be taken through the prompt."""

    def check(self, policy: Policy, prompt_ids: np.ndarray | None = None) -> None:
        """Raises InputError unless this state was captured under that policy (and, where given, from that prompt)."""
        prompt = self.fingerprint.prompt if prompt_ids is None else prompt_digest(prompt_ids)
        wanted = Fingerprint(prompt, policy.version, policy.model)
        for name, remedy in (("configuration", "capture the prompt with this policy's model and mesh"),
                             ("prompt", "capture this group's own prompt"),
                             ("parameters", "the policy was updated or replaced since: capture the prompt again")):
            given, now = getattr(self.fingerprint, name), getattr(wanted, name)
            if given != now:
                shown = "" if name == "configuration" else f" ({given[-12:]} against {now[-12:]})"
                raise InputError(f"the resident state was captured from other {name}{shown}; {remedy}")

    def device_bytes(self) -> dict[str, int]:
        """Bytes per device, by part."""
        parts = {"pages": self.rows, "recurrent": self.recurrent, "entries": self.entries.states if self.entries else ()}
        return {name: tree_bytes(part) for name, part in parts.items() if jax.tree.leaves(part) and on_device(part)}

    def host_bytes(self) -> dict[str, int]:
        """Bytes per device that wait in the host's memory, by part."""
        parts = {"pages": self.rows, "entries": self.entries.states if self.entries else ()}
        return {name: tree_bytes(part) for name, part in parts.items() if jax.tree.leaves(part) and not on_device(part)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateCotangent:
    """d loss / d z_P, summed over a group's members: in the statistics dtype, placed as the state. Used up by the sweep."""

    rows: dict[str, jax.Array]
    recurrent: Tree

    def device_bytes(self) -> int:
        return tree_bytes((self.rows, self.recurrent))


def on_device(tree: Tree) -> bool:
    return all(x.sharding.memory_kind != "pinned_host" for x in jax.tree.leaves(tree))


def tree_bytes(tree: Tree) -> int:
    """Bytes per device of a tree of arrays, abstract or not."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def page_count(model: Model, tokens: int) -> int:
    """Pages, over all owners, for `tokens` positions: the same number on every owner, whole key blocks where they are large."""
    per_owner = -(-tokens // (model.sizes.page * model.owners.count))
    step = max(1, model.sizes.keys // model.sizes.page)
    if per_owner > step:
        per_owner = -(-per_owner // step) * step
    return per_owner * model.owners.count


def abstract_state(model: Model, mesh: AnyMesh, pages: int) -> tuple[dict, Tree]:
    """(rows, recurrent) as shapes with shardings: what a capture of up to pages * page tokens will hold."""
    shapes, specs = model.abstract_recurrent()

    def sized(s, spec):
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec, memory_kind="device"))

    placed = NamedSharding(mesh, rows_spec(model), memory_kind="pinned_host" if model.memory == "host" else "device")
    rows = {name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=placed)
            for name, s in model.abstract_rows(pages, model.sizes.page).items()}
    return rows, jax.tree.map(sized, shapes, specs)


def state_placement(model: Model, mesh: AnyMesh) -> tuple[dict, Tree]:
    """Shardings of (rows, recurrent), their memory included."""
    return jax.tree.map(lambda s: s.sharding, abstract_state(model, mesh, model.owners.count))


def rows_spec(model: Model) -> PartitionSpec:
    """Page rows are shared out over their pages."""
    return PartitionSpec(None, model.owners.axes)


def empty_state(model: Model, mesh: jax.sharding.Mesh, pages: int) -> tuple[dict, Tree]:
    """Zero (rows, recurrent), made where they live."""
    return parameters.zeros(abstract_state(model, mesh, pages))


def cotangent_specs(model: Model) -> tuple[dict, Tree]:
    """How the cotangents of (rows, recurrent) are placed."""
    return dict.fromkeys(model.pulled_rows, rows_spec(model)), model.abstract_recurrent()[1]


def abstract_cotangent(model: Model, state: tuple[dict, Tree]) -> tuple[dict, Tree]:
    """The cotangents of (rows, recurrent), arrays or shapes: as shapes with shardings."""
    wide = statistics_dtype(model.dtype)
    pulled = {name: state[0][name] for name in model.pulled_rows}, state[1]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, wide, sharding=x.sharding.with_memory_kind("device")), pulled)


def zero_cotangent(policy: Policy, state: ResidentState) -> StateCotangent:
    """A fresh accumulator for the members' cotangents of the state."""
    return StateCotangent(*parameters.zeros(abstract_cotangent(policy.model, (state.rows, state.recurrent))))
