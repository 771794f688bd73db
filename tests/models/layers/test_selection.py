"""Global selection over owners against a full row of scores and a stable sort: the same on every mesh and for every tile."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import stretch_case as case
from longstraw_jax.config import BlockSizes
from longstraw_jax.models.layers.selection import select
from longstraw_jax.sharding import make_mesh

H, D, K = 3, 4, 7


@dataclass(frozen=True)
class Program:
    mesh: tuple[int, int]
    queries: int
    keys: int
    exchange: str = "rounds"
    k: int = K


PROGRAMS = [
    Program((1, 1), queries=24, keys=1024),
    Program((1, 1), queries=7, keys=5),  # tiles of 6 queries, blocks of 4 keys
    Program((2, 1), queries=4, keys=7),
    Program((2, 2), queries=6, keys=3),
    Program((2, 2), queries=6, keys=4, exchange="fetch"),
    Program((8, 1), queries=3, keys=6),
    Program((8, 1), queries=1, keys=4, exchange="fetch"),
]


@functools.cache
def program(given):
    """(q [T, H, D], w, prefix keys, own keys, lengths) -> selection [T, k]."""
    mesh = make_mesh(*given.mesh)
    sizes = BlockSizes(queries=given.queries, keys=given.keys)

    def run(q, w, prefix, own, lengths):
        segment, pages = case.segment_and_pages(mesh, "index", prefix, own, lengths)
        sources = [p.stretch("index", jnp.int32(case.LAYER), segment.owners) for p in pages]
        return select(q, w, segment, sources, sizes, given.k, given.exchange)

    tokens, rows, scalar = PartitionSpec(mesh.axis_names), PartitionSpec(None, mesh.axis_names), PartitionSpec()
    return jax.jit(jax.shard_map(
        run, mesh=mesh, in_specs=(tokens, tokens, rows, rows, scalar), out_specs=tokens, check_vma=False))


def run(given, lengths, q, w, prefix, own):
    pages, block = case.layouts(make_mesh(*given.mesh))
    selection = program(given)(
        *(case.to_owners(block, x) for x in (q, w)), case.stack(pages, prefix, lengths.prefix),
        case.stack(block, own, lengths.after), lengths.arrays())
    assert selection.dtype == np.int32
    return case.to_sequence(block, selection)


def scores_of(lengths, q, w, prefix, own):
    """Full scores [T, rows], -inf where a row is in the future or is none; and the rows' positions."""
    at = lengths.keys
    visible = (at[None] <= lengths.queries[:, None]) & (at != case.NONE)
    scores = np.einsum("th,ths->ts", w, np.maximum(np.einsum("thd,sd->ths", q, np.concatenate([prefix, own])) / 2, 0))
    return np.where(visible, scores, -np.inf), at


def wanted(lengths, *arrays, k=K):
    scores, at = scores_of(lengths, *arrays)
    order = np.argsort(-scores, 1, kind="stable")[:, :k]  # rows lie in the order of their positions
    chosen = np.where(np.isfinite(np.take_along_axis(scores, order, 1)), at[order], case.NONE)
    return np.sort(np.pad(chosen, ((0, 0), (0, k - chosen.shape[1])), constant_values=case.NONE), 1)


def drawn(kind, seed=0):
    """q, w of both signs, prefix keys, own keys; `integers` and `equal` are exact in any order of summation, and tie."""
    rng = np.random.default_rng(seed)
    shapes = (case.BLOCK, H, D), (case.BLOCK, H), (case.ROOM, D), (case.ROOM, D)
    if kind == "equal":
        return [np.ones(size) for size in shapes]
    if kind == "integers":
        return [rng.integers(-1, 2, size).astype(float) for size in shapes]
    return [rng.normal(size=size) for size in shapes]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["normal", "integers", "equal"])
@pytest.mark.parametrize("given", PROGRAMS, ids=repr)
def test_equals_a_stable_sort(given, kind):
    for seed, lengths in enumerate(case.LENGTHS):
        arrays = drawn(kind, seed)
        np.testing.assert_array_equal(run(given, lengths, *arrays), wanted(lengths, *arrays), err_msg=str(lengths))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("given", PROGRAMS, ids=repr)
def test_equal_scores_select_the_lowest_positions(given):
    lengths = case.LENGTHS[0]
    selection = run(given, lengths, *drawn("equal"))
    np.testing.assert_array_equal(selection, np.tile(np.arange(K), (case.BLOCK, 1)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("given", PROGRAMS[4:6], ids=repr)
def test_a_few_owners_may_hold_all_that_is_selected(given):
    """The best keys lie in three neighbouring pages and in the segment: an even share of every owner's best is another set."""
    lengths = case.LENGTHS[0]
    q, w, prefix, own = drawn("normal", 4)
    q, w, prefix, own = np.abs(q), np.abs(w), 0.1 * np.abs(prefix), 0.1 * np.abs(own)
    prefix[20:26] *= 1000
    selection = run(given, lengths, q, w, prefix, own)
    np.testing.assert_array_equal(selection, wanted(lengths, q, w, prefix, own))
    assert all(set(range(20, 26)) <= set(row) for row in selection)
    owner = np.array([case.layouts(make_mesh(*given.mesh))[0].locate(p)[0] for p in range(20, 26)])
    share = -(-K // (given.mesh[0] * given.mesh[1]))
    assert np.bincount(owner).max() > share or len(set(owner)) < given.mesh[0] * given.mesh[1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("exchange", ["rounds", "fetch"])
def test_all_visible_positions_where_k_suffices(exchange):
    given = Program((2, 1), queries=4, keys=6, exchange=exchange, k=2 * case.ROOM + 3)
    for lengths in case.LENGTHS:
        selection = run(given, lengths, *drawn("integers"))
        for t, row in zip(lengths.queries, selection, strict=True):
            visible = lengths.keys[lengths.keys <= t]
            np.testing.assert_array_equal(row, np.pad(visible, (0, given.k - len(visible)), constant_values=case.NONE))


def test_no_gradient():
    """Differentiating what surrounds it neither fails on the selection's loops nor computes tangents of scores."""
    mesh = make_mesh(*PROGRAMS[2].mesh)
    arrays = [np.float32(x) for x in drawn("normal")]
    lengths = case.LENGTHS[0].arrays()
    arrays[2:] = (np.float32(case.stack(layout, x, case.ROOM)) for layout, x in zip(case.layouts(mesh), arrays[2:], strict=True))

    def loss(*arrays):
        return sum(x.sum() for x in arrays) + program(PROGRAMS[2])(*arrays, lengths).sum()

    plain, gradient = (str(jax.make_jaxpr(f)(*arrays)) for f in (loss, jax.grad(loss, (0, 1, 2, 3))))
    assert plain.count("dot_general") == gradient.count("dot_general") > 0


def test_temporaries_do_not_grow_with_the_keys():
    """Neither scores nor candidates of a whole row exist: only a block's."""
    given = Program((2, 1), queries=12, keys=64, k=16)

    def temporaries(room):
        def shape(*size):
            return jax.ShapeDtypeStruct(size, jnp.float32)

        lengths = {name: jax.ShapeDtypeStruct((), jnp.int32) for name in vars(case.LENGTHS[0])}
        rows = shape(case.LAYERS, room, D), shape(case.LAYERS, case.ROOM, D)
        compiled = program(given).lower(shape(case.BLOCK, H, D), shape(case.BLOCK, H), *rows, lengths).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(256), temporaries(4096)
    assert long <= 1.01 * short
