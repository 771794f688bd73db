"""Paged attention and its transpose against dense softmax attention over one sequence, in float64.

The pages are filled as the engine fills them: the prompt's dealt to the owners page by page, a branch's own in blocks that
the owners share out evenly. Whatever lies beyond a length, and every other layer of the stack, holds huge numbers.
"""

import functools
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.config import BlockSizes
from longstraw_jax.kernels_pallas import implementation
from longstraw_jax.models.base import Pages, Segment
from longstraw_jax.models.layers import paged_attention
from longstraw_jax.models.layers.paged_attention import KeyValues, attend, pull_attend
from longstraw_jax.sharding import Layout, Owners, make_mesh

HEADS, KV, D, LAYERS, LAYER = 6, 2, 5, 2, 1
PAGE, PAGES = 4, 3  # tokens of a page, pages of every owner
GRANULE, BLOCKS = 6, 2  # of the branch: tokens of every owner in a block, blocks
HUGE = 1e30
NAMES = ("k", "v")

pytestmark = pytest.mark.usefixtures("x64")


@dataclass(frozen=True)
class Case:
    """A program: owners, tile sizes, and whether a prompt comes before the branch and takes cotangents."""

    owners: int
    queries: int
    keys: int
    prefix: str = "differentiated"
    together: int = 0
    """Blocks that a library's kernel, its formula here, attends to at a time where all queries see them whole; 0: XLA attends."""

    @property
    def layouts(self):
        owners = Owners(("context", "expert"), self.owners)
        return Layout(owners, PAGE), Layout(owners, GRANULE)

    @property
    def block(self):
        return GRANULE * self.owners

    @property
    def room(self):
        """Tokens that the prefix's and the branch's own pages have room for."""
        return PAGE * PAGES * self.owners, self.block * BLOCKS


CASES = [
    Case(1, queries=6, keys=1024),
    Case(1, queries=4, keys=4),  # tiles of 3 queries, blocks of 4 rows
    Case(1, queries=6, keys=5, prefix="none"),
    Case(2, queries=2, keys=3),
    Case(2, queries=6, keys=6, prefix="fixed"),
    Case(8, queries=3, keys=12),
    Case(1, queries=6, keys=2, together=3),
    Case(2, queries=3, keys=3, together=2),
]


@dataclass(frozen=True)
class Lengths:
    """Tokens: of the prompt, of the branch before the segment, of the branch with it."""

    prefix: int
    before: int
    after: int


def lengths_of(case):
    """Ragged ones; short prompts leave owners without a row."""
    prefix, own = case.room
    if case.prefix == "none":
        return [Lengths(0, 0, 1), Lengths(0, 0, case.block), Lengths(0, case.block, own - 1)]
    return [Lengths(1, 0, case.block), Lengths(prefix, case.block, own),
            Lengths(prefix - PAGE - 1, case.block, case.block + 1), Lengths(0, 0, case.block - 1)]


@functools.cache
def program(case):
    """(q [T, H, D], its cotangent, prefix k and v, own k and v, lengths) -> (out, lse, cotangent of q, of the rows)."""
    mesh = make_mesh(case.owners)
    sizes = BlockSizes(queries=case.queries, keys=case.keys)
    block_layout = case.layouts[1]

    def granules(rows, granule):
        return rows.reshape(LAYERS, -1, granule, KV, D)

    def run(q, q_bar, prefix, own, lengths):
        own_pages = Pages.of({n: granules(own[n], GRANULE) for n in NAMES}, lengths["prefix"], lengths["after"])
        prefix_pages = Pages.of({n: granules(prefix[n], PAGE) for n in NAMES}, jnp.int32(0), lengths["prefix"])
        start, length = lengths["prefix"] + lengths["before"], lengths["after"] - lengths["before"]
        segment = Segment(jnp.zeros(GRANULE, int), start, length, block_layout)
        pages = [own_pages] if case.prefix == "none" else [prefix_pages, own_pages]
        sources = [KeyValues.of(p, jnp.int32(LAYER), block_layout.owners, case.keys) for p in pages]
        with implementation("cudnn" if case.together else "xla"), mock.patch.object(paged_attention, "_TOGETHER", case.together):
            out, lse = attend(q, segment, sources, sizes)
        # the buffers hold something already, as in the middle of a walk
        buffers = [tuple(jnp.ones_like(p.rows[n]) for n in NAMES) for p in pages]
        if case.prefix == "fixed":
            buffers[0] = None
        return out, lse, *pull_attend(q, out, lse, q_bar, segment, sources, buffers, sizes)

    tokens, rows, scalar = PartitionSpec(mesh.axis_names), PartitionSpec(None, mesh.axis_names), PartitionSpec()
    return jax.jit(jax.shard_map(
        run, mesh=mesh, in_specs=(tokens, tokens, rows, rows, scalar), out_specs=(tokens, tokens, tokens, rows),
        check_vma=False))


def to_owners(layout, x):
    """[tokens, ...] in the order of the sequence -> the device-major order of a sharded array."""
    x = layout.from_sequence(jnp.asarray(x))
    return x.reshape(-1, *x.shape[2:])


def to_sequence(layout, x):
    return layout.to_sequence(x.reshape(layout.owners.count, -1, *x.shape[1:]))


def stack(layout, x, length):
    """A layer's rows [tokens, KV, D] among other layers' -> [LAYERS, slots, KV, D]; only `length` tokens are real."""
    x = np.where(np.arange(len(x))[:, None, None] < length, x, HUGE)
    return jnp.full((LAYERS, *x.shape), HUGE).at[LAYER].set(to_owners(layout, x))


def drawn(case, seed=0):
    """Sequence-ordered q, its cotangent, prefix k and v, own k and v."""
    rng, (prefix, own) = np.random.default_rng(seed), case.room
    q, q_bar = rng.normal(size=(2, case.block, HEADS, D))
    return q, q_bar, *({n: rng.normal(size=(room, KV, D)) for n in NAMES} for room in (prefix, own))


def run(case, lengths, q, q_bar, prefix, own):
    """The program's results back in the order of the sequence: out, lse, q's cotangent, [(k's, v's) per source]."""
    pages_layout, block_layout = case.layouts
    numbers = {name: jnp.int32(n) for name, n in vars(lengths).items()}
    out, lse, q_bar, rows = program(case)(
        *(to_owners(block_layout, x) for x in (q, q_bar)),
        {n: stack(pages_layout, x, lengths.prefix) for n, x in prefix.items()},
        {n: stack(block_layout, x, lengths.after) for n, x in own.items()}, numbers)
    layouts = [block_layout] if case.prefix == "none" else [pages_layout, block_layout]
    for pair in filter(None, rows):
        for x in pair:
            np.testing.assert_array_equal(x[:LAYER], 1, err_msg="another layer's cotangent changed")
    rows = [pair and tuple(to_sequence(layout, x[LAYER]) - 1 for x in pair)
            for layout, pair in zip(layouts, rows, strict=True)]
    return *(to_sequence(block_layout, x) for x in (out, lse, q_bar)), rows


@functools.partial(jax.jit, static_argnames="case")
def dense(case, lengths, q, q_bar, prefix, own):
    """Softmax attention of the segment's queries over the sequence prefix + own: (out, lse), and what q_bar pulls back."""
    i, j = (jnp.arange(room) for room in case.room)
    at = jnp.concatenate([i, lengths["prefix"] + j])
    real = jnp.concatenate([i < lengths["prefix"], j < lengths["after"]])
    positions = lengths["prefix"] + lengths["before"] + jnp.arange(q.shape[0])
    visible = real[None] & (at[None] <= positions[:, None])

    def attention(q, prefix, own):
        k, v = (jnp.repeat(jnp.concatenate([prefix[n], own[n]]), HEADS // KV, 1) for n in NAMES)
        scores = jnp.where(visible[None], jnp.einsum("thd,shd->hts", q, k) / np.sqrt(D), -jnp.inf)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v), jax.scipy.special.logsumexp(scores, -1).T

    (out, lse), pull = jax.vjp(attention, q, prefix, own)
    return (out, lse), pull((q_bar, jnp.zeros_like(lse)))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_equals_dense_attention(case):
    for seed, lengths in enumerate(lengths_of(case)):
        q, q_bar, prefix, own = drawn(case, seed)
        *given, rows = run(case, lengths, q, q_bar, prefix, own)
        (out, lse), (wanted_q, *wanted_rows) = dense(case, vars(lengths), q, q_bar, prefix, own)
        for name, a, b in zip(("out", "lse", "q"), given, (out, lse, wanted_q), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=f"{name} {lengths}")
        for pair, wanted in zip(rows, wanted_rows[-len(rows) :], strict=True):
            for name, x in zip(NAMES, pair or (), strict=pair is not None):
                np.testing.assert_allclose(x, wanted[name], rtol=1e-9, atol=1e-11, err_msg=f"{name} {lengths}")
        assert (rows[0] is None) == (case.prefix == "fixed")


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=repr)
def test_no_future_key(case):
    """Rows after a position are real for the later queries of the same tile; to the earlier ones they must not exist."""
    lengths = Lengths(case.room[0] - 3, case.block, case.room[1])
    q, q_bar, prefix, own = drawn(case)
    out, lse, *_ = run(case, lengths, q, q_bar, prefix, own)
    for token in (0, 1, case.block - 2):
        later = np.arange(case.room[1])[:, None, None] > lengths.before + token
        changed = {n: np.where(later, x + 5, x) for n, x in own.items()}
        seen, seen_lse, *_ = run(case, lengths, q, q_bar, prefix, changed)
        np.testing.assert_array_equal(seen[: token + 1], out[: token + 1])
        np.testing.assert_array_equal(seen_lse[: token + 1], lse[: token + 1])
        assert not np.array_equal(seen[token + 1], out[token + 1])


def test_blocks_stop_at_the_last_visible_row():
    """Row blocks that no query can see, or that hold no token, are not visited."""
    owners = Owners(("context", "expert"), 2)
    rows = jnp.zeros((1, 24, KV, D))
    source = KeyValues(rows, rows, jnp.int32(0), jnp.int32(100), jnp.int32(17), Layout(owners, 4), 4)
    # rounds of 8 tokens fill one block of 4 rows on each owner
    visited = {99: 0, 100: 1, 107: 1, 108: 2, 115: 2, 116: 3, 10_000: 3}
    assert {last: int(source.blocks(jnp.int32(last))) for last in visited} == visited


def test_a_block_is_whole_when_no_query_lacks_a_row_of_it():
    owners = Owners(("context", "expert"), 2)
    rows = jnp.zeros((1, 24, KV, D))
    source = KeyValues(rows, rows, jnp.int32(0), jnp.int32(100), jnp.int32(45), Layout(owners, 4), 4)
    # rounds of 8 tokens fill one block of 4 rows on each owner; the last of six is not full
    whole = {99: 0, 106: 0, 107: 1, 114: 1, 115: 2, 10_000: 5}
    assert {first: int(source.whole_blocks(jnp.int32(first))) for first in whole} == whole
    assert [source.joined(n).block for n in (1, 2, 4, 5, 6, 16)] == [4, 8, 12, 12, 24, 24]
    assert [int(source.joined(n).whole_blocks(jnp.int32(10_000))) for n in (2, 3, 16)] == [2, 1, 0]


def test_the_library_takes_the_whole_blocks():
    """Whatever it says of them is believed: of each owner two blocks of the prompt's rows, and one of the branch's own before the
    segment."""
    case = CASES[-1]
    lengths = Lengths(case.room[0], case.block, case.room[1])
    drawn_rows = drawn(case)
    out, lse, *_ = run(case, lengths, *drawn_rows)
    program.cache_clear()
    with mock.patch.object(paged_attention, "dense_attention", lambda q, k, v: (0 * q, q[..., 0] * 0 + 50)):
        other, other_lse, *_ = run(case, lengths, *drawn_rows)
    program.cache_clear()
    assert np.abs(other).max() < 1e-9 < np.abs(out).min()
    np.testing.assert_allclose(other_lse, 50 + np.log(case.owners * 3), rtol=1e-12)


def test_bfloat16_statistics_are_float32(mesh, per_owner):
    case = Case(1, queries=6, keys=4, prefix="none")
    lengths = Lengths(0, case.block, case.room[1])
    q, _, prefix, own = drawn(case)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (q, prefix, own))
    block_layout = case.layouts[1]
    rows = {n: stack(block_layout, x, lengths.after).astype(jnp.bfloat16) for n, x in own.items()}
    rows = {n: x.reshape(LAYERS, -1, GRANULE, KV, D) for n, x in rows.items()}
    pages = Pages.of(rows, jnp.int32(0), jnp.int32(lengths.after))
    segment = Segment(jnp.zeros(GRANULE, int), jnp.int32(lengths.before), jnp.int32(GRANULE), block_layout)

    def run(q, pages, segment):
        sources = [KeyValues.of(pages, jnp.int32(LAYER), block_layout.owners, case.keys)]
        return attend(q, segment, sources, BlockSizes(queries=6))

    out, lse = per_owner(run, mesh(1), PartitionSpec(), PartitionSpec())(half[0], pages, segment)
    q, prefix, own = jax.tree.map(lambda x: x.astype(jnp.float64), half)
    (wanted, wanted_lse), _ = dense(case, vars(lengths), q, q, prefix, own)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5)
    np.testing.assert_allclose(out.astype(jnp.float32), wanted, atol=2e-2)
