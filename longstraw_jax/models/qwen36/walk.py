"""The walk over Qwen3.6's layers, up (`extend`) and down (`pull`).

Up: a scan over periods, three GDN layers and one attention layer each. Down: a hand-written reverse loop; `jax.vjp` of one
layer at a time, the attention's backward pass by hand, parameter gradients and page cotangents added in place into the
loop's carry. A plain `jax.vjp` over the network would return page-sized copies and a gradient tree beside the accumulator.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from longstraw_jax.models.base import Branch, BranchCotangent, NewRows, Pages, Segment, Tree
from longstraw_jax.models.layers.paged_attention import KeyValues, attend, pull_attend
from longstraw_jax.models.layers.stacked import add_entry, entry, read, set_entry, write
from longstraw_jax.models.qwen36.attention import Projections

if TYPE_CHECKING:
    from longstraw_jax.models.qwen36.model import Qwen36Model


def extend(
    model: Qwen36Model, trainable: Tree, frozen: Tree, branch: Branch, segment: Segment, stored: bool
) -> tuple[Branch, jax.Array, Tree]:
    """The segment through all layers: (branch after it, hidden states before the final norm, what `pull` needs).

    Kept for `pull`: each layer's input and each attention's output with its log-normaliser. A caller that does not use them
    pays nothing: they are dead code then. Where the rows are `stored` the loop carries no pages, which XLA might copy.
    """
    x = model.embed(trainable, frozen, segment)
    first_slot = (segment.start - branch.own.start) // model.owners.count
    length = segment.start - branch.own.start + segment.length
    to_host = branch.own.host and not stored

    def period(carry, xs):
        x, rows = carry
        trainable, frozen, recurrent, layer = xs
        x, (inputs, recurrent) = lax.scan(gdn, x, (trainable["gdn"], frozen["gdn"], recurrent))
        attention = model.bind("attention", trainable["attention"], frozen["attention"])
        q, gate, k, v = attention.project(x, segment)
        new = None if stored else NewRows({"k": k, "v": v}, first_slot)
        if rows is not None:
            rows = {name: write(rows[name], y[None], (layer, first_slot)) for name, y in new.rows.items()}
        own = dataclasses.replace(branch.own, rows=branch.own.rows if rows is None else rows, length=length)
        out, lse = attend(q, segment, _sources(model, branch.prefix, own, layer, new), model.sizes)
        kept = {"gdn": inputs, "attention": x, "out": out, "lse": lse}
        return (attention.finish(x, out, gate, segment), rows), (recurrent, kept, new.rows if to_host else None)

    def gdn(x, xs):
        trainable, frozen, state = xs
        y, state = model.bind("gdn", trainable, frozen)(x, state, segment)
        return y, (x, state)

    stacks = ({name: tree.get(name, {}) for name in ("gdn", "attention")} for tree in (trainable, frozen))
    (x, rows), (recurrent, kept, new) = lax.scan(
        period, (x, None if stored or to_host else branch.own.rows), (*stacks, branch.recurrent, jnp.arange(model.spec.periods)))
    own = branch.own.with_new(new, first_slot) if to_host else branch.own if stored else dataclasses.replace(branch.own, rows=rows)
    own = dataclasses.replace(own, length=length)
    return Branch(branch.prefix, own, recurrent), x, kept


def pull(
    model: Qwen36Model, trainable: Tree, frozen: Tree, branch: Branch, segment: Segment, kept: Tree, hidden: jax.Array,
    cotangent: BranchCotangent, gradient: Tree,
) -> tuple[BranchCotangent, Tree]:
    """The transpose of `extend`, layers in reverse. See `models.base.Model.pull`."""
    down = _Down(model, trainable, frozen, branch, segment, kept)

    def period(step, carry):
        i = model.spec.periods - 1 - step
        x_bar, cotangent, gradient = down.attention(i, *carry)

        def gdn(step, carry):
            return down.gdn(i, model.spec.recurrent_per_period - 1 - step, *carry)

        return lax.fori_loop(0, model.spec.recurrent_per_period, gdn, (x_bar, cotangent, gradient))

    x_bar, cotangent, gradient = lax.fori_loop(0, model.spec.periods, period, (hidden, cotangent, gradient))
    return cotangent, model.pull_embed(trainable, segment, x_bar, gradient)


@dataclasses.dataclass(frozen=True)
class _Down:
    """One layer backwards at a time; what does not change on the way down."""

    model: Qwen36Model
    trainable: Tree
    frozen: Tree
    branch: Branch
    segment: Segment
    kept: Tree

    def attention(self, i, x_bar, cotangent: BranchCotangent, gradient: Tree):
        x, out, lse = (entry(self.kept[name], i) for name in ("attention", "out", "lse"))
        mine, fixed = (entry(tree.get("attention", {}), i) for tree in (self.trainable, self.frozen))
        (q, gate, k, v), pull_project = jax.vjp(
            lambda p, x: self.model.bind("attention", p, fixed).project(x, self.segment), mine, x)
        _, pull_finish = jax.vjp(
            lambda p, x, out, gate: self.model.bind("attention", p, fixed).finish(x, out, gate, self.segment), mine, x, out, gate)
        finish_bar, x_bar, out_bar, gate_bar = pull_finish(x_bar)

        sources = _sources(self.model, self.branch.prefix, self.branch.own, i)
        buffers = [rows and (rows["k"], rows["v"]) for rows in _rows(self.branch.prefix, cotangent)]
        q_bar, buffers = pull_attend(q, out, lse, out_bar, self.segment, sources, buffers, self.model.sizes)
        cotangent = _with_rows(self.branch.prefix, cotangent, buffers)
        # the segment's own rows, after every later query and this segment's have added to them
        k_bar, v_bar = (self._read(cotangent.own[name], y, i) for name, y in (("k", k), ("v", v)))
        project_bar, x_bar_2 = pull_project(Projections(q_bar, gate_bar, k_bar, v_bar))
        x_bar = x_bar + x_bar_2
        if "attention" in gradient:
            grown = add_entry(add_entry(gradient["attention"], finish_bar, i), project_bar, i)
            gradient = {**gradient, "attention": grown}
        return x_bar, cotangent, gradient

    def gdn(self, i, j, x_bar, cotangent: BranchCotangent, gradient: Tree):
        mine, fixed = (entry(tree.get("gdn", {}), i, j) for tree in (self.trainable, self.frozen))
        state, exit_bar = entry(self.branch.recurrent, i, j), entry(cotangent.recurrent, i, j)
        _, pull_layer = jax.vjp(
            lambda p, x, s: self.model.bind("gdn", p, fixed)(x, s, self.segment), mine, entry(self.kept["gdn"], i, j), state)
        exit_bar = jax.tree.map(lambda bar, s: bar.astype(s.dtype), exit_bar, state)
        layer_bar, x_bar, entry_bar = pull_layer((x_bar, exit_bar))
        recurrent = set_entry(cotangent.recurrent, entry_bar, i, j)
        if "gdn" in gradient:
            gradient = {**gradient, "gdn": add_entry(gradient["gdn"], layer_bar, i, j)}
        return x_bar, dataclasses.replace(cotangent, recurrent=recurrent), gradient

    def _read(self, rows, like, i):
        slot = (self.segment.start - self.branch.own.start) // self.model.owners.count
        return read(rows, (i, slot), (1, *like.shape))[0].astype(like.dtype)


def _sources(model: Qwen36Model, prefix: Pages | None, own: Pages, layer, new: NewRows | None = None) -> list[KeyValues]:
    before = [KeyValues.of(prefix, layer, model.owners, model.sizes.keys)] if prefix is not None else []
    return [*before, KeyValues.of(own, layer, model.owners, model.sizes.keys, new)]


def _rows(prefix: Pages | None, cotangent: BranchCotangent) -> list[dict | None]:
    """Cotangent rows in the order of `_sources`."""
    return [cotangent.own] if prefix is None else [cotangent.prefix, cotangent.own]


def _with_rows(prefix: Pages | None, cotangent: BranchCotangent, buffers) -> BranchCotangent:
    """The inverse of `_rows`."""
    rows = [buffer and dict(zip(("k", "v"), buffer, strict=True)) for buffer in buffers]
    return dataclasses.replace(cotangent, own=rows[-1], prefix=None if prefix is None else rows[0])
