"""Capture: the prompt through the model once, forward only, chunk by chunk, into the resident state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from longstraw_jax.config import GradientConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Branch, Model, Pages, Segment, Tree
from longstraw_jax.policy import Policy
from longstraw_jax.programs import StageProgram
from longstraw_jax.sharding import AnyMesh, Layout
from longstraw_jax.state import EntryStates, Fingerprint, ResidentState, empty_state, page_count, rows_spec, state_placement


@functools.cache
def capture_program(model: Model, mesh: AnyMesh) -> StageProgram:
    """(trainable, frozen, rows, recurrent, ids [chunk], start, length) -> (rows, recurrent); the state is donated."""

    def chunk(trainable, frozen, rows, recurrent, ids, start, length):
        branch = Branch(None, Pages.of(rows, jnp.int32(0), start, model.memory == "host"), recurrent)
        segment = Segment(ids, start, length, Layout(model.owners, model.sizes.page))
        branch, _, _ = model.extend(trainable, frozen, branch, segment)
        return branch.own.paged(), branch.recurrent

    trainable, frozen = map(parameters.specs, model.abstract_parameters())
    state = (dict.fromkeys(model.abstract_rows(1, 1), rows_spec(model)), model.abstract_recurrent()[1])
    scalar = PartitionSpec()
    return StageProgram(chunk, mesh, (trainable, frozen, *state, model.owners.spec, scalar, scalar), state, donate=(2, 3),
                        placed=state_placement(model, mesh))


def chunk_tokens(model: Model, tokens: int) -> int:
    """Tokens of one program call: the configured chunk in whole pages of every owner, no more than the prompt needs."""
    round_ = model.sizes.page * model.owners.count
    return round_ * max(1, min(model.sizes.chunk // round_, -(-tokens // round_)))


def capture_pages(model: Model, tokens: int) -> int:
    """Pages, over all owners, that a capture of `tokens` positions fills: whole chunks, so that the last can write its padding."""
    chunk = chunk_tokens(model, tokens)
    return page_count(model, -(-tokens // chunk) * chunk)


def paged_order(ids: np.ndarray, layout: Layout) -> np.ndarray:
    """Tokens of a chunk in the order of a device-major array: owner by owner, each owner's pages in turn."""
    return ids.reshape(-1, layout.owners.count, layout.granule).swapaxes(0, 1).reshape(-1)


def capture(
    policy: Policy, prompt_ids: Int[np.ndarray, "P"], *, capacity: int | None = None, gradient: str | GradientConfig = "response",
    progress: Callable[[int, int], None] | None = None,
) -> ResidentState:
    """Evaluates positions 0 .. P-2 of a prompt and keeps what later tokens need (DESIGN: z_P). No autograd, no logits.

    Args:
      policy: model, mesh and parameters.
      prompt_ids: token ids, P >= 2; the last one is kept for the responses' first input.
      capacity: positions to make room for, at least P - 1; prompts captured with the same capacity share their programs.
      gradient: what the state will be used for. "full" also keeps the recurrent state at the chunks' entries, for `sweep`.
      progress: called with (positions done, P - 1) after every chunk.

    Raises InputError for ids that are no tokens of the model, for a prompt of one token and for a capacity below the prompt's.
    """
    model, mesh = policy.model, policy.mesh
    prompt_ids = _checked(prompt_ids, model.vocabulary)
    tokens = len(prompt_ids) - 1
    capacity = tokens if capacity is None else capacity
    if capacity < tokens:
        raise InputError(f"capacity of {capacity} positions for a prompt of {tokens + 1} tokens; wanted at least {tokens}")
    gradient = GradientConfig.of(gradient)
    chunk, entries = chunk_tokens(model, capacity), {}
    rows, recurrent = empty_state(model, mesh, capture_pages(model, capacity))
    program = capture_program(model, mesh)
    for start in range(0, tokens, chunk):
        if min(start + chunk, tokens) > gradient.reach(tokens):
            entries[start] = _kept(recurrent, gradient.entry_states)
        ids, length = chunk_ids(policy, prompt_ids, start, chunk)
        rows, recurrent = program(policy.trainable, policy.frozen, rows, recurrent, ids, jnp.int32(start), jnp.int32(length))
        jax.block_until_ready((rows, recurrent))  # one chunk in flight: queued programs would each hold their inputs
        if progress:
            progress(start + length, tokens)
    return ResidentState(rows, recurrent, tokens, int(prompt_ids[-1]), Fingerprint.of(policy, prompt_ids),
                         EntryStates(chunk, entries) if entries else None)


def chunk_ids(policy: Policy, prompt_ids: np.ndarray, start: int, chunk: int) -> tuple[jax.Array, int]:
    """(padded ids [chunk] placed as the pages are, real tokens) of the prompt's chunk at `start`; the last token is no part of it."""
    length = min(chunk, len(prompt_ids) - 1 - start)
    ids = np.pad(np.asarray(prompt_ids[start : start + length], np.int32), (0, chunk - length))
    ids = paged_order(ids, Layout(policy.model.owners, policy.model.sizes.page))
    sharding = NamedSharding(policy.mesh, policy.model.owners.spec)
    return jax.make_array_from_callback((chunk,), sharding, ids.__getitem__), length


def _kept(recurrent: Tree, where: str) -> Tree:
    """A copy that outlives the program which the original is donated to."""
    if where == "host":
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), recurrent)
    return jax.tree.map(jnp.copy, recurrent)


def _checked(prompt_ids: np.ndarray, vocabulary: int) -> np.ndarray:
    ids = np.asarray(prompt_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"prompt ids have shape {ids.shape} and dtype {ids.dtype}; wanted whole numbers in one dimension")
    if len(ids) < 2:
        raise InputError(f"a prompt of {len(ids)} tokens; wanted at least 2 (the last one is the responses' first input)")
    bad = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(bad):
        raise InputError(f"prompt token {bad[0]} is id {ids[bad[0]]}; wanted 0 <= id < {vocabulary} (the model's vocabulary)")
    return ids.astype(np.int32)
