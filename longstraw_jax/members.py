"""The program of a group's response branches: forward, objective, and backward, one member after the other.

Scoring and replay are this one program; scoring makes no backward step. So the old policy's log-probabilities are the very
numbers that replay computes, and the first on-policy ratio is exactly 1.

A member's inputs are [prompt[-1], r_1 .. r_{R-1}] at positions P-1 .. P+R-2 and its targets r_1 .. r_R. It is cut into
blocks. Forward, only each block's entry state is kept (the recurrent part; rows are append-only). Backward, the blocks come in
reverse: each is run again, and the cotangents of its log-probabilities, of its rows and of its exit state are pulled through.
What is pulled out of the first block is the member's cotangent of the prompt's state: dropped, or summed for the prompt sweep.
The accumulators are the carry of the scan over members: their number is a trip count, never a memory multiplier.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from longstraw_jax.config import ObjectiveConfig
from longstraw_jax.gradients import grown
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Branch, BranchCotangent, Model, Pages, Segment, Tree
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.stacked import entry, set_entry
from longstraw_jax.objective import loss_and_slope, settings_of
from longstraw_jax.policy import Policy
from longstraw_jax.programs import StageProgram
from longstraw_jax.sharding import AnyMesh, Layout
from longstraw_jax.state import ResidentState, StateCotangent, cotangent_specs, rows_spec
from longstraw_jax.types import Response

Leaf = Any
"""A NumPy array before the program, a JAX array inside it, or how either is placed: a `PartitionSpec`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Members:
    """A group's responses as arrays, padded to one bucket: G members x N blocks x B tokens."""

    ids: Leaf
    """[G, N, B] int32: inputs."""
    targets: Leaf
    """[G, N, B] int32."""
    mask: Leaf
    """[G, N, B] bool: tokens that are trained; pads are not."""
    old: Leaf
    """[G, N, B] log-probabilities of the old policy; unused where `on_policy`."""
    reference: Leaf
    """[G, N, B] log-probabilities of the reference policy."""
    length: Leaf
    """[G] int32: tokens of each response."""
    advantage: Leaf
    """[G]"""
    weight: Leaf
    """[G]: factor of the response's summed token losses."""
    on_policy: Leaf
    """[G] bool: the old policy is the present one, so `old` is what this program computes."""

    @classmethod
    def specs(cls, token_axes: tuple[str, ...]) -> Members:
        tokens, scalar = PartitionSpec(None, None, token_axes), PartitionSpec()
        return cls(**{f.name: tokens if f.name in ("ids", "targets", "mask", "old", "reference") else scalar
                      for f in dataclasses.fields(cls)})


def unpack(logprobs: jax.Array, responses: Sequence[Response]) -> list[np.ndarray]:
    """[G, N, B] -> one array [R_i] per response."""
    flat = np.asarray(logprobs).reshape(len(responses), -1)
    return [row[: len(r.ids)] for row, r in zip(flat, responses, strict=True)]


class MembersResult(NamedTuple):
    """What one call of the program gives."""

    gradient: Tree
    cotangent: StateCotangent | None
    logprobs: jax.Array
    """[G, N, B]"""
    losses: jax.Array
    """[G], weighted."""


def run_members(
    policy: Policy, state: ResidentState, members: Members, gradient: Tree, objective: ObjectiveConfig, *, backward: bool,
    cotangent: StateCotangent | None = None,
) -> MembersResult:
    """One call of the program. `gradient` and `cotangent`, the accumulators, are used up; without `cotangent` none is taken."""
    settings = settings_of(objective, statistics_dtype(policy.model.dtype))
    boundary = (cotangent.rows, cotangent.recurrent) if cotangent else ()
    gradient, boundary, logprobs, losses = members_program(policy.model, policy.mesh, cotangent is not None)(
        policy.trainable, policy.frozen, gradient, boundary, state.rows, state.recurrent, jnp.int32(state.length), members,
        settings, jnp.int32(backward))
    return MembersResult(gradient, StateCotangent(*boundary) if cotangent else None, logprobs, losses)


def bucket(model: Model, longest: int) -> tuple[int, int]:
    """(blocks, tokens a block) that hold a response of `longest` tokens; powers of two, so that few programs are compiled."""
    owners = model.owners.count
    per_owner = _power_of_two(-(-min(longest, model.sizes.block) // owners))
    per_owner = max(1, min(per_owner, model.sizes.block // owners))
    block = per_owner * owners
    return _power_of_two(-(-longest // block)), block


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def pack(
    model: Model, last_token: int, responses: Sequence[Response], *, old: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None, advantages: np.ndarray | None = None, weights: np.ndarray | None = None,
) -> Members:
    """Host arrays of a group after a prompt that ends in `last_token`. `old` None: the old policy is the present one."""
    blocks, block = bucket(model, max(len(r.ids) for r in responses))
    dtype = np.dtype(statistics_dtype(model.dtype))

    def padded(rows, dtype):
        out = np.zeros((len(rows), blocks * block), dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out.reshape(len(rows), blocks, block)

    group = len(responses)
    nothing = [()] * group
    return Members(
        ids=padded([[last_token, *r.ids[:-1]] for r in responses], np.int32),
        targets=padded([r.ids for r in responses], np.int32),
        mask=padded([r.mask for r in responses], bool),
        old=padded(nothing if old is None else old, dtype),
        reference=padded(nothing if reference is None else reference, dtype),
        length=np.array([len(r.ids) for r in responses], np.int32),
        advantage=np.asarray(np.zeros(group) if advantages is None else advantages, dtype),
        weight=np.asarray(np.zeros(group) if weights is None else weights, dtype),
        on_policy=np.full(group, old is None),
    )


def members_program(model: Model, mesh: AnyMesh, to_prompt: bool = False) -> StageProgram:
    """(trainable, frozen, gradient, boundary, rows, recurrent, captured, members, settings, backward)
    -> (gradient, boundary, logprobs [G, N, B], losses [G]); the accumulators `gradient` and `boundary` are donated.

    `boundary` holds the cotangents of (rows, recurrent), or nothing unless `to_prompt`. `captured` is the number of captured
    positions; `backward` 0 only scores, 1 adds the group's gradient.
    """
    return _members_program(model, mesh, to_prompt)  # the cache tells f(x, y=1) from f(x, 1)


@functools.cache
def _members_program(model: Model, mesh: AnyMesh, to_prompt: bool) -> StageProgram:
    def group(trainable, frozen, gradient, boundary, rows, recurrent, captured, members, settings, backward):
        prompt = Pages.of(rows, jnp.int32(0), captured, model.memory == "host")
        walk = _Walk(model, trainable, frozen, prompt, recurrent, settings, backward)
        if to_prompt:
            boundary = Pages.of(boundary[0], prompt.start, captured).rows, boundary[1]

        def grow(gradient):
            (gradient, after), figures = lax.scan(walk.member, (gradient, boundary), members)
            return gradient, (after, figures)

        gradient, (boundary, (logprobs, losses)) = grown(model, gradient, grow)
        if to_prompt:
            boundary = dataclasses.replace(prompt, rows=boundary[0], host=False).paged(), boundary[1]
        return gradient, boundary, model.owners.gather(logprobs, axis=2), model.owners.sum(losses)

    scalar, specs = PartitionSpec(), [parameters.specs(tree) for tree in model.abstract_parameters()]
    state = (dict.fromkeys(model.abstract_rows(1, 1), rows_spec(model)), model.abstract_recurrent()[1])
    boundary = cotangent_specs(model) if to_prompt else ()
    settings = dict.fromkeys(("clip_low", "clip_high", "kl_beta", "temperature"), scalar)
    ins = (specs[0], specs[1], specs[0], boundary, *state, scalar, Members.specs(model.owners.axes), settings, scalar)
    return StageProgram(group, mesh, ins, (specs[0], boundary, scalar, scalar), donate=(2, 3))


class _Up(NamedTuple):
    """What the way up leaves for the way down."""

    branch: Branch
    """After the response."""
    entries: Tree
    """[N, ..] recurrent state before each block."""
    logprobs: jax.Array
    """[N, B]"""
    lse: jax.Array
    """[N, B] log-normalisers."""
    choices: Tree
    """[N, ..] what each block chose; made again, not anew, on the way down."""
    kept: tuple[jax.Array, Tree] | None
    """Of a response of one block: its hidden states, and what its backward pass needs. Several blocks are run again."""


@dataclass(frozen=True)
class _Walk:
    """One member up and down. Holds what all members share."""

    model: Model
    trainable: Tree
    frozen: Tree
    prompt: Pages
    recurrent: Tree
    settings: dict
    backward: jax.Array

    def member(self, carry: tuple, m: Members):
        """A step of the scan over members; the carry is (gradient, boundary)."""
        gradient, boundary = carry
        blocks, per_owner = m.ids.shape
        wide = statistics_dtype(self.model.dtype)
        rows = self.model.abstract_rows(blocks * self.model.owners.count, per_owner)
        rows = {name: jnp.zeros((s.shape[0], blocks * per_owner, *s.shape[3:]), s.dtype) for name, s in rows.items()}
        branch = Branch(self.prompt, Pages(rows, self.prompt.length, jnp.int32(0), per_owner), self.recurrent)
        used = -(-m.length // (per_owner * self.model.owners.count))

        up = self._up(m, branch, used)
        old = jnp.where(m.on_policy, lax.stop_gradient(up.logprobs), m.old)
        loss, slope = loss_and_slope(up.logprobs, old, m.reference, m.mask, m.advantage, m.weight, self.settings)

        pulled = {name: rows[name] for name in self.model.pulled_rows}
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, wide), (pulled, self.recurrent))
        cotangent = BranchCotangent(boundary[0] if boundary else None, *nothing)

        def down(step, carry):
            return self._down(used - 1 - step, m, up, slope, *carry)

        cotangent, gradient = lax.fori_loop(0, used * self.backward, down, (cotangent, gradient))
        if boundary:
            boundary = cotangent.prefix, jax.tree.map(jnp.add, boundary[1], cotangent.recurrent)
        return (gradient, boundary), (up.logprobs, loss)

    def _up(self, m: Members, branch: Branch, used) -> _Up:
        """Forward over the used blocks."""
        wide, shape = statistics_dtype(self.model.dtype), m.ids.shape
        if shape[0] == 1:
            branch, figures, hidden, kept = self._block(0, m, branch)
            return _Up(branch, jax.tree.map(lambda x: x[None], self.recurrent), *(x[None] for x in figures), {}, (hidden, kept))

        def block(b, carry):
            branch, entries, figures, choices = carry
            entries = set_entry(entries, branch.recurrent, b)
            branch, new, _, kept = self._block(b, m, branch)
            return branch, entries, set_entry(figures, new, b), set_entry(choices, self.model.choices(kept), b)

        entries, choices = jax.tree.map(
            lambda x: jnp.zeros((shape[0], *x.shape), x.dtype), (branch.recurrent, self.model.abstract_choices(shape[1])))
        figures = jnp.zeros(shape, wide), jnp.zeros(shape, wide)
        branch, entries, figures, choices = lax.fori_loop(0, used, block, (branch, entries, figures, choices))
        return _Up(branch, entries, *figures, choices, None)

    def _block(self, b, m: Members, branch: Branch):
        """One block forward, its head included: (branch, (logprobs, lse), hidden, kept)."""
        branch, hidden, kept = self.model.extend(self.trainable, self.frozen, branch, self._segment(b, m))
        targets = entry(m.targets, b)
        figures = self.model.logprobs(self.trainable, self.frozen, hidden, targets, self.settings["temperature"])
        return branch, figures, hidden, kept

    def _down(self, b, m: Members, up: _Up, slope, cotangent: BranchCotangent, gradient: Tree):
        """One block backward."""
        segment, branch = self._segment(b, m), dataclasses.replace(up.branch, recurrent=entry(up.entries, b))
        hidden, kept = up.kept or self.model.extend(
            self.trainable, self.frozen, branch, segment, stored=True, choices=entry(up.choices, b))[1:]
        hidden, gradient = self.model.pull_logprobs(
            self.trainable, self.frozen, hidden, *entry((m.targets, up.lse, slope), b), gradient, self.settings["temperature"])
        return self.model.pull(self.trainable, self.frozen, branch, segment, kept, hidden, cotangent, gradient)

    def _segment(self, b, m: Members) -> Segment:
        owners, per_owner = self.model.owners, m.ids.shape[1]
        block = per_owner * owners.count
        length = jnp.clip(m.length - b * block, 0, block)
        ids = entry(m.ids, b)
        return Segment(ids, self.prompt.length + b * block, length, Layout(owners, per_owner))
