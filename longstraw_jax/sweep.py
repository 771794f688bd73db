"""Sweep: the state's cotangent through the prompt, once per group; with it the gradient is the whole sequence's.

The walk of replay, continued below the boundary. The prompt's chunks come in reverse. Each is run again from the recurrent
state that capture kept at its entry (its pages are all there), and the cotangents of its rows and of its exit state are pulled
through: parameter gradients grow, earlier rows' cotangents are added to in place, the entry state's cotangent goes to the
chunk before. Source: DESIGN section 1, "prompt sweep".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int

from longstraw_jax.capture import chunk_ids
from longstraw_jax.config import GradientConfig
from longstraw_jax.errors import InputError
from longstraw_jax.gradients import cosine, grown
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Branch, BranchCotangent, Model, Pages, Segment, Tree
from longstraw_jax.policy import Policy
from longstraw_jax.programs import StageProgram
from longstraw_jax.replay import Replay
from longstraw_jax.sharding import AnyMesh, Layout
from longstraw_jax.state import EntryStates, ResidentState, StateCotangent, cotangent_specs, rows_spec


@functools.cache
def sweep_program(model: Model, mesh: AnyMesh) -> StageProgram:
    """(trainable, frozen, gradient, cotangent, rows, entry, ids [chunk], start, length, fixed) -> (gradient, cotangent).

    `cotangent` is that of (rows, recurrent), of the chunk's exit on the way in and of its entry on the way out; it and
    `gradient` are donated. Tokens at positions below `fixed` are held fixed.
    """

    def chunk(trainable, frozen, gradient, cotangent, rows, entry, ids, start, length, fixed):
        branch = Branch(None, Pages.of(rows, jnp.int32(0), start, model.memory == "host"), entry)
        segment = Segment(ids, start, length, Layout(model.owners, model.sizes.page), fixed)
        after, hidden, kept = model.extend(trainable, frozen, branch, segment, stored=True)
        branch = dataclasses.replace(branch, own=after.own)
        rows_bar = Pages.of(cotangent[0], jnp.int32(0), start).rows

        def grow(gradient):
            # nobody reads the prompt's hidden states: all that comes down comes from rows and recurrent states
            below, gradient = model.pull(
                trainable, frozen, branch, segment, kept, jnp.zeros_like(hidden), BranchCotangent(None, rows_bar, cotangent[1]),
                gradient)
            return gradient, below

        gradient, below = grown(model, gradient, grow)
        return gradient, (dataclasses.replace(branch.own, rows=below.own).paged(), below.recurrent)

    trainable, frozen = map(parameters.specs, model.abstract_parameters())
    rows, recurrent = dict.fromkeys(model.abstract_rows(1, 1), rows_spec(model)), model.abstract_recurrent()[1]
    scalar, cotangent = PartitionSpec(), cotangent_specs(model)
    ins = (trainable, frozen, trainable, cotangent, rows, recurrent, model.owners.spec, scalar, scalar, scalar)
    return StageProgram(chunk, mesh, ins, (trainable, cotangent), donate=(2, 3))


def sweep(
    policy: Policy, state: ResidentState, prompt_ids: Int[np.ndarray, "P"], replayed: Replay, *,
    gradient: str | GradientConfig = "full", progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Adds to a replay's gradient what reaches the parameters through the prompt's state.

    Args:
      state: captured, and replayed from, with the same `gradient`.
      replayed: its gradient and its cotangent are used up. Where it has no cotangent there is nothing to sweep.
      progress: called with (positions done, positions to do) after every chunk.

    Returns the replay with the gradient of the whole sequence's loss; with a `prompt_gradient_window` of N, the gradient with
    the state of all but the last N captured positions held fixed. `measure_cosine` adds `full_gradient_cosine` to the metrics
    (of what the accumulator then holds: start it anew for one group's own).

    Raises InputError where the state is another prompt's or an older policy's, or was captured for a shorter sweep.
    """
    gradient = GradientConfig.of(gradient)
    state.check(policy, prompt_ids)
    if replayed.cotangent is None:
        return replayed
    entries = _required(state, gradient)
    fixed = gradient.fixed(state.length)
    walk = _Walk(policy, state, entries, np.asarray(prompt_ids), gradient.reach(state.length), progress)
    if not gradient.measure_cosine:
        swept, _ = walk.down(replayed.gradient, replayed.cotangent, state.length, fixed)
        return dataclasses.replace(replayed, gradient=swept, cotangent=None)
    edge = min(-(-fixed // entries.chunk) * entries.chunk, state.length)  # down to here both gradients are one
    swept, cotangent = walk.down(replayed.gradient, replayed.cotangent, state.length, edge)
    whole, _ = walk.down(*jax.tree.map(jnp.copy, (swept, cotangent)), edge, 0)
    swept, _ = walk.down(swept, cotangent, edge, fixed)
    figures = replayed.metrics | {"full_gradient_cosine": float(cosine(swept, whole))}
    return dataclasses.replace(replayed, gradient=swept, cotangent=None, metrics=figures)


def _required(state: ResidentState, gradient: GradientConfig) -> EntryStates:
    reach = gradient.reach(state.length)
    entries = state.entries
    if entries is None or min(entries.states) > reach:
        kept = "no entry states" if entries is None else f"entry states from position {min(entries.states)} on"
        raise InputError(f"the resident state holds {kept}, and this gradient goes back to position {reach}; capture the prompt with "
                         "the same `gradient` options")
    return entries


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Stretches of one prompt, downwards."""

    policy: Policy
    state: ResidentState
    entries: EntryStates
    prompt_ids: np.ndarray
    reach: int
    progress: Callable[[int, int], None] | None

    def down(self, gradient: Tree, cotangent: StateCotangent, top: int, fixed: int) -> tuple[Tree, StateCotangent]:
        """From position `top`, a chunk's end, down to `fixed`, which may lie inside a chunk."""
        policy, chunk = self.policy, self.entries.chunk
        program, below = sweep_program(policy.model, policy.mesh), (cotangent.rows, cotangent.recurrent)
        for start in reversed(range(fixed // chunk * chunk, top, chunk) if fixed < top else ()):
            ids, length = chunk_ids(policy, self.prompt_ids, start, chunk)
            # from where they waited, the host's memory maybe, to where the program takes them
            entry = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), self.entries.states[start], self.state.recurrent)
            gradient, below = program(
                policy.trainable, policy.frozen, gradient, below, self.state.rows, entry, ids, jnp.int32(start), jnp.int32(length),
                jnp.int32(fixed))
            jax.block_until_ready(gradient)
            if self.progress:
                self.progress(self.state.length - max(start, self.reach), self.state.length - self.reach)
        return gradient, StateCotangent(*below)
