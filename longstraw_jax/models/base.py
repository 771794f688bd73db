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
from longstraw_jax.sharding import Layout, Owners

Tree = Any
"""A nested dict of arrays."""


def static_field() -> Any:
    """A dataclass field that JAX treats as part of the type, not as data."""
    return dataclasses.field(metadata={"static": True})


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

    @classmethod
    def of(cls, paged: dict[str, Float[Array, "L granules granule ..."]], start: Int[Array, ""], length: Int[Array, ""]) -> Pages:
        """From the form that states have between programs."""
        granule = next(iter(paged.values())).shape[2]
        return cls({name: x.reshape(x.shape[0], -1, *x.shape[3:]) for name, x in paged.items()}, start, length, granule)

    def paged(self) -> dict[str, Float[Array, "L granules granule ..."]]:
        """The inverse of `of`."""
        return {name: x.reshape(x.shape[0], -1, self.granule, *x.shape[2:]) for name, x in self.rows.items()}


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
    """Cotangents of a branch's parts, pages in the statistics dtype; added to in place while a walk goes backwards."""

    prefix: dict[str, Array] | None
    """Of the prefix's rows; None where the gradient stops at the boundary."""
    own: dict[str, Array]
    recurrent: Tree


@dataclass(frozen=True)
class Parameter:
    """One entry of a model's abstract tree: all that is known of a parameter before it exists."""

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    """How the owners share it out."""
    layers: np.ndarray | None
    """Layer number of each entry of the leading, stacked dimensions; None for a parameter outside the layers."""
    name: str
    """Checkpoint name, below `layers.N.` for a layer's parameter."""
    init: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    """First value of one layer's entry."""


@runtime_checkable
class Model(Protocol):
    """A model family as the engine sees it: hashable, without arrays; parameters travel as two nested dicts."""

    owners: Owners
    sizes: BlockSizes
    dtype: str
    lora: LoraConfig | None
    vocabulary: int
    max_positions: int
    """Positions the model was published for."""
    checkpoint_prefixes: dict[str, str]
    """Name prefixes on disk -> canonical ones."""
    checkpoint_ignored: tuple[str, ...]
    """Prefixes of names on disk that the model has no use for."""

    def abstract_parameters(self) -> tuple[Tree, Tree]:
        """(trainable, frozen) as trees of `Parameter`."""

    def abstract_rows(self, granules: int, granule: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Page rows of `granules` granules over all owners; dimension 1 is shared out."""

    def abstract_recurrent(self) -> tuple[Tree, Tree]:
        """(shapes over all owners, partition specs) of the recurrent part."""

    def extend(
        self, trainable: Tree, frozen: Tree, branch: Branch, segment: Segment, *, stored: bool = False
    ) -> tuple[Branch, Array, Tree]:
        """The one operator: (branch after the segment, hidden states [T, D], what `pull` needs).

        `stored`: the segment ran before and its rows are in the branch's own pages, so they are read and not written again.
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
