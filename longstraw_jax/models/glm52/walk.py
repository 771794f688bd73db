"""The walk over GLM-5.2's layers, up (`extend`) and down (`pull`).

Up: two scans, the layers with a dense feed-forward part and those with experts. A full-index layer selects anew, a shared one
keeps the selection of the last full layer before it (IndexShare): a conditional inside the loop, with its collectives. Index
keys are written outside of it, so that pages are never a conditional's result. Down: hand-written reverse loops, as for the
other family; what was selected and routed on the way up is used again, never chosen anew.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from longstraw_jax.models.base import Branch, BranchCotangent, NewRows, Pages, Segment, Tree
from longstraw_jax.models.layers.experts import ExpertStack, expert_ffn, pull_expert_ffn
from longstraw_jax.models.layers.latent_attention import Selected, attend_selected, pull_attend_selected
from longstraw_jax.models.layers.selection import Exchange, select
from longstraw_jax.models.layers.stacked import add_entry, entry, read, set_entry, write
from longstraw_jax.sharding import Stretch

if TYPE_CHECKING:
    from longstraw_jax.models.glm52.model import Glm52Model

KINDS = ("dense", "routed")
"""The stacks of layers, in the order in which they run."""


def extend(
    model: Glm52Model, trainable: Tree, frozen: Tree, branch: Branch, segment: Segment, stored: bool, choices: Tree | None
) -> tuple[Branch, jax.Array, Tree]:
    """The segment through all layers. See `models.base.Model.extend`.

    Kept for `pull`: each layer's input, and the choices, {"selection": [full layers, T, k], "routing": [routed layers, T, k]}.
    """
    up = _Up(model, trainable, frozen, branch, segment, stored, choices)
    x = model.embed(trainable, frozen, segment)
    carry, kept = (x, up.room_for_selections(), None if stored or up.to_host else branch.own.rows), {}
    for kind in KINDS:
        carry, kept[kind] = lax.scan(lambda carry, xs, kind=kind: up.layer(kind, carry, xs), carry, up.stacks(kind))
    x, selection, rows = carry
    inputs, routing = {kind: kept[kind][0] for kind in KINDS}, kept["routed"][1]
    own = up.own(rows)
    if up.to_host:
        latent, index = (jnp.concatenate([kept[kind][2][name] for kind in KINDS]) for name in ("latent", "index"))
        own = own.with_new({"latent": latent, "index": index[jnp.asarray(model.spec.full_layers)]}, up.slot)
    kept = {"inputs": inputs, "choices": {"selection": selection, "routing": routing}}
    return Branch(branch.prefix, own, branch.recurrent), x, kept


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What both directions share."""

    model: Glm52Model
    trainable: Tree
    frozen: Tree
    branch: Branch
    segment: Segment

    @property
    def slot(self):
        """Of the segment's first token in the branch's own pages."""
        return (self.segment.start - self.branch.own.start) // self.model.owners.count

    def bind(self, kind: str, trainable: Tree, frozen: Tree):
        return self.model.bind(kind, trainable, frozen)

    def selected(self, selection, layer, own: Pages, new: NewRows | None = None) -> Selected:
        spec = self.model.spec
        return Selected(
            selection, self.segment, self.sources("latent", layer, own, new), spec.qk_head_dim**-0.5, spec.kv_lora_rank,
            self.model.tile_sizes, self.exchange(own))

    def sources(self, name: str, layer, own: Pages, new: NewRows | None) -> list[Stretch]:
        before = [self.branch.prefix.stretch(name, layer, self.model.owners)] if self.branch.prefix is not None else []
        return [*before, own.stretch(name, layer, self.model.owners, new)]

    def exchange(self, own: Pages) -> Exchange:
        """Long segments fetch the rows that they see, short ones send their queries to the rows (DESIGN, section 3)."""
        if self.model.exchange != "auto":
            return self.model.exchange
        rows = sum(pages.rows["latent"].shape[1] for pages in (self.branch.prefix, own) if pages is not None)
        return "fetch" if 100 * self.segment.ids.shape[0] >= rows else "rounds"

    def experts(self, layer) -> ExpertStack:
        """The routed experts; `layer` counts the layers that have some."""
        parameters = {p: {**self.frozen.get("experts", {}).get(p, {}), **self.trainable.get("experts", {}).get(p, {})}
                      for p in ("gate_proj", "up_proj", "down_proj")}
        return ExpertStack(parameters, layer, self.model.plan)


@dataclasses.dataclass(frozen=True)
class _Up(_Layer):
    stored: bool
    choices: Tree | None

    def stacks(self, kind: str):
        """What a scan over the layers of a kind runs over."""
        layers = self.model.layers_of(kind)
        full, index = self.model.index_layers
        return (self.trainable.get(kind, {}), self.frozen.get(kind, {}), jnp.asarray(layers, jnp.int32), jnp.arange(len(layers)),
                jnp.asarray(full[layers]), jnp.asarray(index[layers], jnp.int32))

    def room_for_selections(self):
        """Of every full-index layer; filled where the choices are known."""
        if self.choices is not None:
            return self.choices["selection"]
        room = self.model.abstract_choices(self.segment.ids.shape[0])["selection"]
        return jnp.zeros(room.shape, room.dtype)

    @property
    def to_host(self) -> bool:
        """Whether the segment's rows must be written into the host's memory, after the layers."""
        return self.branch.own.host and not self.stored

    def own(self, rows) -> Pages:
        length = self.segment.start - self.branch.own.start + self.segment.length
        return dataclasses.replace(self.branch.own, rows=self.branch.own.rows if rows is None else rows, length=length)

    def layer(self, kind: str, carry, xs):
        x, selection, rows = carry
        trainable, frozen, layer, within, full, index = xs
        bound = self.bind(kind, trainable, frozen)
        q, row = bound.project(x, self.segment)
        new = None if self.stored else NewRows({"latent": row, "index": self.new_keys(bound, x, full, rows, index, row)}, self.slot)
        if rows is not None:
            keys = new.rows["index"]
            rows = {"latent": write(rows["latent"], row[None], (layer, self.slot)),
                    "index": write(rows["index"], keys[None], (index, self.slot))}
        own = self.own(rows)
        if self.choices is None:
            mine = lax.cond(full, lambda: self.search(bound, x, index, own, new), lambda: entry(selection, index))
            selection = set_entry(selection, mine, index)
        read_, _ = attend_selected(q, self.selected(entry(selection, index), layer, own, new))
        to_write = new.rows if self.to_host else None
        h = bound.finish(x, read_, self.segment)
        if kind == "dense":
            return (bound.feed_forward(h, self.segment), selection, rows), (x, None, to_write)
        routing = bound.route(h, self.segment) if self.choices is None else entry(self.choices["routing"], within)
        n, weights, rest = bound.around_experts(h, routing, self.segment)
        y = rest + expert_ffn(n, routing, weights, self.segment.valid(), self.experts(within))
        return (y, selection, rows), (x, routing, to_write)

    def indexer(self, index):
        return self.bind("indexer", {}, entry(self.frozen["indexer"], index))

    def new_keys(self, bound, x, full, rows, index, row):
        """A full-index layer's index keys; a shared layer's are those of the layer before, written once more, or nothing."""
        def keys():
            return self.indexer(index).keys(bound.index_inputs(x, self.segment)[0], self.segment).astype(row.dtype)

        def old():
            shape = (1, row.shape[0], self.model.spec.index_head_dim)
            return jnp.zeros(shape[1:], row.dtype) if rows is None else read(rows["index"], (index, self.slot), shape)[0].astype(row.dtype)

        return lax.cond(full, keys, old)

    def search(self, bound, x, index, own: Pages, new: NewRows | None):
        u, low = bound.index_inputs(x, self.segment)
        q, w = self.indexer(index).queries(u, low, self.segment)
        sources = self.sources("index", index, own, new)
        return select(q, w, self.segment, sources, self.model.tile_sizes, self.model.spec.index_topk, self.exchange(own))


def pull(
    model: Glm52Model, trainable: Tree, frozen: Tree, branch: Branch, segment: Segment, kept: Tree, hidden: jax.Array,
    cotangent: BranchCotangent, gradient: Tree,
) -> tuple[BranchCotangent, Tree]:
    """The transpose of `extend`, layers in reverse. See `models.base.Model.pull`."""
    down = _Down(model, trainable, frozen, branch, segment, kept)
    carry = hidden, cotangent, gradient
    for kind in reversed(KINDS):
        count = len(model.layers_of(kind))
        carry = lax.fori_loop(0, count, lambda step, carry, kind=kind, count=count: down.layer(kind, count - 1 - step, *carry), carry)
    x_bar, cotangent, gradient = carry
    return cotangent, model.pull_embed(trainable, segment, x_bar, gradient)


@dataclasses.dataclass(frozen=True)
class _Down(_Layer):
    kept: Tree

    def layer(self, kind: str, i, x_bar, cotangent: BranchCotangent, gradient: Tree):
        x = entry(self.kept["inputs"][kind], i)
        layer = jnp.asarray(self.model.layers_of(kind), jnp.int32)[i]
        index = jnp.asarray(self.model.index_layers[1], jnp.int32)[layer]
        mine, fixed = (entry(tree.get(kind, {}), i) for tree in (self.trainable, self.frozen))

        (q, row), pull_project = jax.vjp(lambda p, x: self.bind(kind, p, fixed).project(x, self.segment), mine, x)
        selected = self.selected(entry(self.kept["choices"]["selection"], index), layer, self.branch.own)
        read_, lse = attend_selected(q, selected)
        h, pull_finish = jax.vjp(lambda p, x, read_: self.bind(kind, p, fixed).finish(x, read_, self.segment), mine, x, read_)
        h_bar, above, gradient = self.feed_forward(kind, i, mine, fixed, h, x_bar, gradient)
        finish_bar, x_bar, read_bar = pull_finish(h_bar)

        buffers = [rows and rows["latent"] for rows in self._rows(cotangent)]
        q_bar, buffers = pull_attend_selected(q, read_, lse, read_bar, selected, buffers)
        cotangent = self._with_rows(cotangent, buffers)
        # the segment's own rows, after every later query and this segment's have added to them
        row_bar = read(cotangent.own["latent"], (layer, self.slot), (1, *row.shape))[0].astype(row.dtype)
        project_bar, x_bar_2 = pull_project((q_bar, row_bar))
        if kind in gradient:
            grown = gradient[kind]
            for part in (above, finish_bar, project_bar):
                grown = add_entry(grown, part, i)
            gradient = {**gradient, kind: grown}
        return x_bar + x_bar_2, cotangent, gradient

    def feed_forward(self, kind: str, i, mine, fixed, h, x_bar, gradient: Tree):
        """(cotangent of h, of the layer's parameters, gradient with the experts')."""
        if kind == "dense":
            _, pull_ = jax.vjp(lambda p, h: self.bind(kind, p, fixed).feed_forward(h, self.segment), mine, h)
            above, h_bar = pull_(x_bar)
            return h_bar, above, gradient
        routing = entry(self.kept["choices"]["routing"], i)
        (n, weights, _), pull_ = jax.vjp(
            lambda p, h: self.bind(kind, p, fixed).around_experts(h, routing, self.segment), mine, h)
        n_bar, weights_bar, grown = pull_expert_ffn(
            n, routing, weights, self.segment.valid(), x_bar, self.experts(i), gradient.get("experts", {}))
        above, h_bar = pull_((n_bar.astype(n.dtype), weights_bar.astype(weights.dtype), x_bar))
        return h_bar, above, {**gradient, "experts": grown} if "experts" in gradient else gradient

    def _rows(self, cotangent: BranchCotangent) -> list[dict | None]:
        """Cotangent rows in the order of `sources`."""
        return [cotangent.own] if self.branch.prefix is None else [cotangent.prefix, cotangent.own]

    def _with_rows(self, cotangent: BranchCotangent, buffers) -> BranchCotangent:
        """The inverse of `_rows`."""
        rows = [buffer if buffer is None else {"latent": buffer} for buffer in buffers]
        return dataclasses.replace(cotangent, own=rows[-1], prefix=None if self.branch.prefix is None else rows[0])
