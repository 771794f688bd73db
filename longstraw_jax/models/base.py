"""What the engine and a model family agree on: segments, pages, branches, and the protocol of a model.

A *branch* is one sequence on its way: pages that it only reads (the shared prompt), pages that it appends to, and the
recurrent part, which is overwritten. Capture extends a branch whose own pages are the prompt's; scoring and replay extend a
branch whose prefix is the captured prompt. So one `extend` serves every phase.

Arrays in here are those of one owner, as seen inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.sharding import Layout, Owners, Stretch

Tree = Any
"""A nested dict of arrays."""


def static_field(default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that JAX treats as part of the type, not as data."""
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence. Padding, if any, is at the sequence's end and is inert whatever ids it holds."""

    ids: Int[Array, "T"]
    """Token ids of the owner's slots."""
    start: Int[Array, ""]
    """Position of the segment's first token."""
    length: Int[Array, ""]
    """Real tokens of the segment, over all owners."""
    layout: Layout = static_field()
    fixed: Int[Array, ""] | None = None
    """Position below which tokens are held fixed when the segment is pulled back; None: nothing is."""

    @property
    def owners(self) -> Owners:
        return self.layout.owners

    def positions(self) -> Int[Array, "T"]:
        """Positions of the owner's slots."""
        return self.start + self.layout.offsets(jnp.arange(self.ids.shape[0]), self.owners.index())

    def all_positions(self) -> Int[Array, "N T"]:
        """Positions of every owner's slots."""
        return self.start + self.layout.offsets(jnp.arange(self.ids.shape[0])[None], jnp.arange(self.owners.count)[:, None])

    def valid(self) -> Bool[Array, "T"]:
        """Which of the owner's slots hold a real token."""
        return self.positions() < self.start + self.length

    def hold(self, x: Float[Array, "T *rest"], positions: Int[Array, "T"]) -> Float[Array, "T *rest"]:
        """`x` as it is, its gradient cut off where the position is held fixed."""
        if self.fixed is None:
            return x
        moves = (positions >= self.fixed).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(moves, x, jax.lax.stop_gradient(x))


@dataclass(frozen=True)
class NewRows:
    """A segment's rows of one layer that its pages, in the host's memory, do not hold yet."""

    rows: dict[str, Float[Array, "T ..."]]
    slot: Int[Array, ""]
    """Of the segment's first token."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """What the attention layers keep of a stretch of tokens. Append-only; slot layout as in `sharding.Layout`.

    Granules lie one after the other in one dimension. They are split apart only at a program's edges: a reshape inside a loop
    makes XLA keep the buffer in both shapes, and copy it.
    """

    rows: dict[str, Float[Array, "L S ..."]]
    """One row a slot and attention layer, by the family's names (keys and values, or a latent)."""
    start: Int[Array, ""]
    """Position of the first row."""
    length: Int[Array, ""]
    """Rows that are real, over all owners."""
    granule: int = static_field()
    """Consecutive tokens that an owner holds in a row: a page, or its part of a block."""
    host: bool = static_field(False)
    """Whether the rows lie in the host's memory, from where a layer at a time comes to the device."""

    @classmethod
    def of(
        cls, paged: dict[str, Float[Array, "L granules granule ..."]], start: Int[Array, ""], length: Int[Array, ""], host: bool = False
    ) -> Pages:
        """From the form that states have between programs."""
        granule = next(iter(paged.values())).shape[2]
        return cls({name: x.reshape(x.shape[0], -1, *x.shape[3:]) for name, x in paged.items()}, start, length, granule, host)

    def paged(self) -> dict[str, Float[Array, "L granules granule ..."]]:
        """The inverse of `of`."""
        return {name: x.reshape(x.shape[0], -1, self.granule, *x.shape[2:]) for name, x in self.rows.items()}

    def layer(self, name: str, layer: Int[Array, ""], new: NewRows | None = None) -> Array:
        """Rows on the device: all layers', or from the host's memory a copy [1, S, ...] of the one that is meant.

        `new` rows are put into the copy; where the rows are on the device they have been written already.
        """
        if not self.host:
            return self.rows[name]
        at = (layer, *[0] * (self.rows[name].ndim - 1))
        copy = jax.device_put(jax.lax.dynamic_slice(self.rows[name], at, (1, *self.rows[name].shape[1:])), jax.memory.Space.Device)
        if new is not None:
            copy = jax.lax.dynamic_update_slice(copy, new.rows[name][None].astype(copy.dtype), (0, new.slot, *at[2:]))
        return copy

    def with_new(self, rows: dict[str, Float[Array, "L T ..."]], slot: Int[Array, ""]) -> Pages:
        """Pages in the host's memory with a segment's rows of all layers written at `slot`, in place.

        In a loop of its own: written beside reads, in the loop over the layers, XLA keeps a second copy of the host's buffer.
        """
        def one(old, new):
            def layer(i, old):
                part = jax.device_put(jax.lax.dynamic_slice_in_dim(new, i, 1).astype(old.dtype), jax.memory.Space.Host)
                return jax.lax.dynamic_update_slice(old, part, (i, slot, *[0] * (old.ndim - 2)))

            return jax.lax.fori_loop(0, jnp.int32(old.shape[0]), layer, old)

        return dataclasses.replace(self, rows={name: one(x, rows[name]) for name, x in self.rows.items()})

    def stretch(self, name: str, layer: Int[Array, ""], owners: Owners, new: NewRows | None = None) -> Stretch:
        """The rows `name` of one layer, with what it takes to find a position's row."""
        rows = self.layer(name, layer, new)
        return Stretch(rows, layer, self.start, self.length, Layout(owners, self.granule), alone=self.host)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Branch:
    """One sequence on its way."""

    prefix: Pages | None
    """Pages before the branch: read, never written, shared by every member of a group. None while a prompt is captured."""
    own: Pages
    """Pages of the branch's own tokens."""
    recurrent: Tree
    """State of the recurrent layers after the last token so far (stacked over layers, sharded by heads)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BranchCotangent:
    """Cotangents of a branch's parts, of its `pulled_rows` in the statistics dtype; added to in place while a walk goes backwards."""

    prefix: dict[str, Array] | None
    """Of the prefix's rows; None where the gradient stops at the boundary."""
    own: dict[str, Array]
    recurrent: Tree


@dataclass(frozen=True)
class Packed:
    """What part of a quantised matrix a parameter is; see `models.layers.nf4`."""

    part: str
    """"codes" or "scales"."""
    features: int
    """Inputs of the matrix, its last dimension."""
    dtype: np.dtype
    """Of the matrix where it is used."""


@dataclass(frozen=True)
class Parameter:
    """One entry of a model's abstract tree: all that is known of a parameter before it exists."""

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    """How the owners share it out."""
    stack: np.ndarray | None
    """Of each entry of the leading, stacked dimensions: the first part of its checkpoint name, `layers.3.`; None where nothing is
    stacked."""
    name: str
    """Checkpoint name, or the rest of each entry's."""
    init: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    """First value of one layer's entry, of `entry_shape`."""
    packed: Packed | None = None
    """Of a part of a quantised matrix: which. `name` and `init` are then the matrix's."""

    @property
    def entry_shape(self) -> tuple[int, ...]:
        """Of one layer's entry, as it is in a checkpoint."""
        shape = self.shape[0 if self.stack is None else self.stack.ndim :]
        if self.packed is None:
            return shape
        return (*shape[: -2 if self.packed.part == "codes" else -1], self.packed.features)


@runtime_checkable
class Model(Protocol):
    """A model family as the engine sees it: hashable, without arrays; parameters travel as two nested dicts."""

    owners: Owners
    sizes: BlockSizes
    dtype: str
    memory: str
    """Where the prompt's pages lie: "device", or "host", from where a layer at a time comes to the device."""
    lora: LoraConfig | None
    vocabulary: int
    max_positions: int
    """Positions the model was published for."""
    checkpoint_prefixes: dict[str, str]
    """Name prefixes on disk -> canonical ones."""
    checkpoint_ignored: tuple[str, ...]
    """Prefixes of names on disk that the model has no use for."""
    pulled_rows: tuple[str, ...]
    """The page rows that gradient passes through; the others need no cotangent."""

    def abstract_parameters(self) -> tuple[Tree, Tree]:
        """(trainable, frozen) as trees of `Parameter`."""

    def abstract_rows(self, granules: int, granule: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Page rows of `granules` granules over all owners; dimension 1 is shared out."""

    def abstract_recurrent(self) -> tuple[Tree, Tree]:
        """(shapes over all owners, partition specs) of the recurrent part."""

    def abstract_choices(self, tokens: int) -> Tree:
        """What `extend` chooses, without a gradient, for `tokens` tokens of an owner: selections, routes; {} where it has no choice."""

    def choices(self, kept: Tree) -> Tree:
        """The choices that an `extend` made, out of what it kept for `pull`."""

    def extend(
        self, trainable: Tree, frozen: Tree, branch: Branch, segment: Segment, *, stored: bool = False, choices: Tree | None = None
    ) -> tuple[Branch, Array, Tree]:
        """The one operator: (branch after the segment, hidden states [T, D], what `pull` needs).

        `stored`: the segment ran before and its rows are in the branch's own pages, so they are read and not written again.
        `choices`: those of the run before, to be made again as they were.
        """

    def pull(
        self, trainable: Tree, frozen: Tree, branch: Branch, segment: Segment, kept: Tree, hidden: Array,
        cotangent: BranchCotangent, gradient: Tree,
    ) -> tuple[BranchCotangent, Tree]:
        """The transpose of `extend`: cotangents of hidden and of the branch after -> of the branch before; `gradient` grows.

        `branch` holds the entry state in `recurrent` and, in its pages, the rows that `extend` wrote.
        """

    def logprobs(self, trainable: Tree, frozen: Tree, hidden: Array, targets: Array, temperature: ScalarLike) -> tuple[Array, Array]:
        """(log p(target), log-normaliser) [T] of hidden states."""

    def pull_logprobs(
        self, trainable: Tree, frozen: Tree, hidden: Array, targets: Array, lse: Array, cotangent: Array, gradient: Tree,
        temperature: ScalarLike,
    ) -> tuple[Array, Tree]:
        """The transpose of `logprobs`: the cotangent of hidden; `gradient` grows."""

    def hf_config(self) -> dict:
        """The fields of the `config.json` that the model would be published with."""

    def reference_logprobs(self, weights: dict[str, Array], ids: Array, stop: int) -> Array:
        """The plain one-device oracle: log p(ids[t+1] | ids[:t+1]) [T-1] of a whole sequence, the state of the first `stop`
        positions held fixed under differentiation (0: nothing). `weights` by checkpoint name, adapters included."""
