"""The selection's kernel, interpreted, against NumPy's stable sort of full rows of float64 scores.

Selected positions must be identical. Scores of small integers are exact in any order of summation, and tie; of others the test
makes sure first that no two that compete are closer than rounding could confuse.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from longstraw_jax.errors import InputError
from longstraw_jax.kernels_pallas import Candidates, dsa_merge, dsa_select
from longstraw_jax.kernels_pallas.dsa_select import kernel
from longstraw_jax.sharding import Layout, Owners, Stretch, make_mesh

START = 10
NONE = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """Queries, heads, width, keys, candidates; and tiles other than the kernel's own."""

    q: int
    h: int
    d: int
    s: int
    k: int
    tiling: kernel.Tiling | None = None
    owners: int = 1
    granule: int = 3


CASES = [
    Case(1, 1, 1, 1, 1),
    Case(5, 3, 4, 12, 7),
    Case(16, 2, 16, 32, 64),  # whole tiles; fewer keys than candidates
    Case(17, 3, 5, 100, 9, kernel.Tiling(16, 16, 3, 17)),  # one query and a few keys beside the tiles; buffers overflow
    Case(3, 2, 4, 333, 40, kernel.Tiling(16, 32, 2, 32)),  # a block fills a buffer
    Case(20, 2, 8, 130, 11, kernel.Tiling(16, 16, 12, 64)),  # more splits than blocks
]


def selection(case, q, w, queries, rows, length, candidates):
    """On one of `case.owners`, the kernel's choice."""
    owners = Owners(make_mesh(case.owners).axis_names, case.owners)
    stretch = Stretch(rows, jnp.int32(1), jnp.int32(START), length, Layout(owners, case.granule))
    if case.tiling:
        return kernel.select(q, w, queries, stretch, candidates, interpret=True, tiling=case.tiling)
    return dsa_select(q, w, queries, stretch, 5, candidates, "pallas")


@functools.cache
def program(case):
    """(q, w, queries, keys [owners * S, D], length, candidates) -> candidates of each owner, [owners * Q, k]."""
    mesh, one, every = make_mesh(case.owners), PartitionSpec(), PartitionSpec(("context", "expert"))

    def run(q, w, queries, keys, length, candidates):
        huge = float(jnp.finfo(keys.dtype).max)
        rows = jnp.stack([jnp.full_like(keys, huge), keys, jnp.full_like(keys, -huge)])
        return selection(case, q, w, queries, rows, length, candidates)

    return jax.jit(jax.shard_map(
        run, mesh=mesh, in_specs=(one, one, one, every, one, one), out_specs=every, check_vma=False))


def none(case):
    return Candidates(np.full((case.q, case.k), -np.inf, np.float32), np.full((case.q, case.k), NONE, np.int32))


def drawn(case, kind, seed=0):
    """q, weights of both signs, queries' positions from before the first key to beyond the last, and keys."""
    rng = np.random.default_rng(seed)
    shapes = (case.q, case.h, case.d), (case.q, case.h), (case.s * case.owners, case.d)
    queries = rng.integers(START - 1, START + shapes[2][0] + 3, case.q).astype(np.int32)
    if kind == "equal":
        q, w, keys = (np.ones(size, np.float32) for size in shapes)
    elif kind == "integers":  # their sums times 1 / sqrt(D) are exact where that is a power of two
        q, w, keys = (rng.integers(-1, 2, size).astype(np.float32) for size in shapes)
    else:
        q, w, keys = (rng.normal(size=size).astype(np.float32) for size in shapes)
    if kind == "rising":  # every block beats all before it
        q, w = np.abs(q), np.abs(w)
        keys = np.abs(q).max() * np.linspace(1, 2, len(keys), dtype=np.float32)[:, None] * np.ones(shapes[2], np.float32)
    return q, w, queries, keys


def full_scores(q, w, queries, keys, length):
    """[Q, S] in float64, -inf where a key is not visible."""
    q, w, keys = (np.asarray(x, np.float64) for x in (q, w, keys))
    x = np.maximum(np.einsum("qhd,sd->qhs", q, keys) * q.shape[-1] ** -0.5, 0)
    at = START + np.arange(len(keys))
    visible = (at[None] <= queries[:, None]) & (np.arange(len(keys)) < length)[None]
    return np.where(visible, np.einsum("qh,qhs->qs", w, x), -np.inf)


def wanted(scores, k):
    """(scores, positions) of the k best, by a stable sort."""
    short = max(0, k - scores.shape[1])
    scores = np.pad(scores, ((0, 0), (0, short)), constant_values=-np.inf)
    order = np.argsort(-scores, 1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, 1)
    return best, np.where(np.isfinite(best), START + order, NONE)


def check(case, q, w, queries, keys, length):
    scores = full_scores(q, w, queries, keys, length)
    best, positions = wanted(scores, case.k)
    given = program(case)(q, w, queries, keys, np.int32(length), none(case))
    assert given.scores.dtype == np.float32 and given.positions.dtype == np.int32
    np.testing.assert_array_equal(given.positions, positions)
    np.testing.assert_allclose(given.scores, best, rtol=1e-5, atol=1e-5)


def gaps(scores):
    """The smallest difference between two scores of a query that are not exactly 0, which all relus may make them."""
    rising = np.sort(scores, 1)
    with np.errstate(invalid="ignore"):
        gap = np.diff(rising, axis=1)
    return gap[(rising[:, 1:] != rising[:, :-1]) & np.isfinite(gap)]


EXACT = {1, 4, 16}  # widths whose root is a power of two


@pytest.mark.parametrize("kind", ["normal", "integers", "equal", "rising"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_equals_a_stable_sort(case, kind):
    for seed, length in enumerate((case.s, max(0, case.s - 2))):
        arrays = drawn(case, kind if kind != "integers" or case.d in EXACT else "normal", seed)
        if kind in ("normal", "rising"):
            between = gaps(full_scores(*arrays, length))
            assert not len(between) or between.min() > 2e-6, "another seed: rounding could confuse these scores"
        check(case, *arrays, length)


def test_the_integers_do_tie_and_the_rising_do_overflow():
    arrays = drawn(CASES[1], "integers", 0)
    scores = wanted(full_scores(*arrays, CASES[1].s), CASES[1].k)[0]
    assert (np.diff(scores[np.isfinite(scores).all(1)]) == 0).any()
    case = CASES[4]
    q, w, _, keys = drawn(case, "rising")
    queries = np.full(case.q, START + case.s, np.int32)
    assert rounds(case, q, w, queries, keys) == 6  # eleven blocks, one of each of two programs in a round
    assert rounds(case, q, w, queries, keys[::-1]) == 2  # the first takes in 64, and they beat the rest


def test_what_is_not_written_is_not_read(monkeypatch):
    """Buffers come as the memory was: here full of scores that would beat all, at positions before all."""
    survivors = kernel._Work.survivors

    def poisoned(*arguments):
        scores, at, count, begun = survivors(*arguments)
        there = jnp.arange(scores.shape[2])[None, None] < count[..., None]
        return jnp.where(there, scores, 1e38), jnp.where(there, at, 0), count, begun

    monkeypatch.setattr(kernel._Work, "survivors", poisoned)
    case = Case(17, 3, 5, 90, 9, kernel.Tiling(16, 16, 3, 17))  # no other test's program
    check(case, *drawn(case, "normal", 8), case.s)


def test_no_survivor_is_written_beyond_its_buffer():
    keep, count = jnp.array([[True, False, True, True], [False, True, False, False]]), jnp.array([1, 3], jnp.int32)
    for room in (4, 5):
        kept, slot, grown, fits = kernel._packed(keep, count, room)
        np.testing.assert_array_equal(kept, keep)
        np.testing.assert_array_equal(slot, [[1, room, 2, 3], [room, 3, room, room]])
        np.testing.assert_array_equal(grown, [4, 4])
        assert fits
    kept, slot, grown, fits = kernel._packed(keep, count, 3)  # the first query's would not fit, the second's neither
    assert not fits and not kept.any() and (slot == 3).all() and (grown == count).all()


def test_a_query_beyond_all_positions_selects_no_padding():
    case = CASES[3]
    q, w, queries, keys = drawn(case, "normal", 9)
    queries[:3] = NONE
    check(case, np.abs(q), np.abs(w), queries, np.abs(keys), 30)


def rounds(case, q, w, queries, keys):
    """How often the buffers are sorted in."""
    stretch = Stretch(jnp.asarray(keys)[None], jnp.int32(0), jnp.int32(START), jnp.int32(len(keys)), Layout(Owners((), 1), 3), len(keys))
    work = kernel._Work.of(*map(jnp.asarray, (q, w, queries)), stretch, case.tiling)
    survivors = jax.jit(lambda *x: work.survivors(*x, True))
    candidates, begun, count = Candidates.none(case.q, case.k, jnp.float32), jnp.zeros((1, case.tiling.splits), jnp.int32), 0
    while work.unfinished(begun).any():
        scores, at, there, begun = survivors(*candidates.worst(), begun)
        keep = (jnp.arange(case.tiling.room)[None, None] < there[..., None])[: case.q].reshape(case.q, -1)
        scores, at = (x[: case.q].reshape(case.q, -1) for x in (scores, at))
        assert np.isnan(np.asarray(scores)[~np.asarray(keep)]).all(), "interpreted, what is not written is NaN: it must not be read"
        candidates = candidates.with_more(jnp.where(keep, scores, -jnp.inf), jnp.where(keep, at, NONE))
        count += 1
    return count


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_any_integers(data):
    """One size; whatever ties, weights of zero and either sign, lengths, positions."""
    case = CASES[3]
    case = Case(case.q, 2, 4, 60, case.k, case.tiling)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    high = data.draw(st.integers(0, 3))
    q, keys = (rng.integers(-high, high + 1, size).astype(np.float32) for size in ((case.q, case.h, case.d), (case.s, case.d)))
    w = rng.integers(-1, 2, (case.q, case.h)).astype(np.float32)
    queries = rng.integers(START - 2, START + case.s + 2, case.q).astype(np.int32)
    check(case, q, w, queries, keys, data.draw(st.integers(0, case.s)))


def test_continues_what_other_stretches_offered():
    """Candidates from an earlier stretch, equal scores among them, keep their place by position; in any order they come."""
    case = CASES[3]
    q, w, queries, keys = drawn(Case(case.q, case.h, 4, case.s, case.k), "integers", 4)
    case = Case(case.q, case.h, 4, case.s, case.k, case.tiling)
    scores = full_scores(q, w, queries, keys, case.s)
    rng = np.random.default_rng(5)
    offered = Candidates(rng.integers(-1, 3, (case.q, case.k)).astype(np.float32) / 2,
                         np.tile(rng.permutation(np.r_[0:5, 200:204]).astype(np.int32), (case.q, 1)))
    every = np.concatenate([offered.scores, scores], 1)
    at = np.concatenate([offered.positions, np.where(np.isfinite(scores), START + np.arange(case.s), NONE)], 1)
    order = np.lexsort((at, -every), axis=1)[:, : case.k]
    given = program(case)(q, w, queries, keys, np.int32(case.s), offered)
    np.testing.assert_array_equal(given.positions, np.take_along_axis(at, order, 1))


def test_zeros_of_either_sign_tie():
    case = CASES[3]
    q, keys = np.ones((case.q, case.h, case.d), np.float32), -np.ones((case.s, case.d), np.float32)
    w = np.where(np.arange(case.q) % 2, 1, -1).astype(np.float32)[:, None] * np.ones((1, case.h), np.float32)
    given = program(case)(q, w, np.full(case.q, START + case.s, np.int32), keys, np.int32(case.s), none(case))
    np.testing.assert_array_equal(given.positions, np.tile(START + np.arange(case.k), (case.q, 1)))


@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float16)], ids=str)
def test_narrow_inputs_are_scored_in_float32(dtypes):
    """The inputs are what they were rounded to; their products are exact and their sums float32."""
    case = Case(5, 3, 64, 50, 8, kernel.Tiling(16, 16, 2, 16))
    q, w, queries, keys = drawn(case, "normal", 2)
    q, w, keys = jnp.asarray(q, dtypes[0]), jnp.asarray(w, dtypes[0]), jnp.asarray(keys, dtypes[1])
    assert gaps(full_scores(q, w, queries, keys, case.s)).min() > 2e-6
    check(case, q, w, queries, keys, case.s)


def test_owners_union_is_the_selection_from_all():
    """Eight owners' rows in cyclic granules, every owner through the kernel, some with no visible key; then `dsa_merge`."""
    case = Case(9, 2, 4, 9, 6, owners=8, granule=3)
    q, w, queries, keys = drawn(case, "integers", 6)
    layout = Layout(Owners(("context", "expert"), 8), case.granule)
    for length in (72, 50, 2):
        dealt = np.asarray(layout.from_sequence(jnp.asarray(keys))).reshape(keys.shape)
        given = program(case)(q, w, queries, dealt, np.int32(length), none(case))
        merged = dsa_merge(Candidates(*(x.reshape(8, case.q, case.k) for x in given)))
        best, positions = wanted(full_scores(q, w, queries, keys, length), case.k)
        np.testing.assert_array_equal(merged.positions, positions)
        np.testing.assert_array_equal(merged.scores, best.astype(np.float32))


def test_a_buffer_must_take_a_block():
    with pytest.raises(InputError, match="room for 15 survivors of 16 keys"):
        kernel.Tiling(16, 16, 1, 15)


@pytest.mark.parametrize(
    ("queries", "keys", "k"), [(1, 1, 1), (1, 65_536, 2048), (1024, 65_536, 2048), (300, 5000, 3), (4096, 2**22, 2048)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tiles_of_any_size(queries, keys, k, dtype):
    tiling = kernel.Tiling.of(queries, keys, k, dtype)
    assert all(n & (n - 1) == 0 and n >= 16 for n in (tiling.queries, tiling.keys))
    assert 1 <= tiling.splits <= 132
    assert 3 * k <= tiling.splits * tiling.room <= max(3 * k + 132, tiling.splits * tiling.keys)
