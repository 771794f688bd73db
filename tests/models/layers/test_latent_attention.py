"""Attention over selected latents and its transpose, both exchanges, against dense masked softmax attention in float64."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import stretch_case as case
from longstraw_jax.config import BlockSizes
from longstraw_jax.models.layers.latent_attention import Selected, attend_selected, pull_attend_selected
from longstraw_jax.sharding import make_mesh

H, C, V, K = 3, 7, 5, 11
SCALE = 0.3


@dataclass(frozen=True)
class Program:
    """`fixed`: the prompt's rows take no cotangents."""

    mesh: tuple[int, int]
    queries: int
    keys: int
    exchange: str = "rounds"
    fixed: bool = False


PROGRAMS = [
    Program((1, 1), queries=7, keys=3),  # tiles of 6 queries
    Program((2, 1), queries=4, keys=5, exchange="fetch", fixed=True),
    Program((2, 2), queries=6, keys=2, fixed=True),
    Program((2, 2), queries=3, keys=4, exchange="fetch"),
    Program((8, 1), queries=3, keys=2),
    Program((8, 1), queries=1, keys=6, exchange="fetch"),
]


@functools.cache
def program(given):
    """(q, its output's cotangent, selection, prefix, own, lengths, buffers) -> (out, lse, cotangent of q, buffers)."""
    mesh = make_mesh(*given.mesh)
    sizes = BlockSizes(queries=given.queries, keys=given.keys)

    def run(q, out_bar, selection, prefix, own, lengths, buffers):
        segment, pages = case.segment_and_pages(mesh, "latent", prefix, own, lengths)
        sources = [p.stretch("latent", jnp.int32(case.LAYER), segment.owners) for p in pages]
        selected = Selected(selection, segment, sources, SCALE, V, sizes, given.exchange)
        out, lse = attend_selected(q, selected)
        if given.fixed:
            buffers = [None, *buffers[1:]]
        q_bar, buffers = pull_attend_selected(q, out, lse, out_bar, selected, buffers)
        return out, lse, q_bar, buffers

    tokens, rows, scalar = PartitionSpec(mesh.axis_names), PartitionSpec(None, mesh.axis_names), PartitionSpec()
    return jax.jit(jax.shard_map(
        run, mesh=mesh, in_specs=(tokens, tokens, tokens, rows, rows, scalar, rows), out_specs=(tokens, tokens, tokens, rows),
        check_vma=False), donate_argnums=6)


def run(given, lengths, q, out_bar, selection, prefix, own):
    """Results in the order of the sequence: {"out", "lse", "q", "prefix", "own"}."""
    pages, block = case.layouts(make_mesh(*given.mesh))
    rows = case.stack(pages, prefix, lengths.prefix), case.stack(block, own, lengths.after)
    buffers = [np.ones_like(x) for x in rows]  # they hold something already, as in the middle of a walk
    if given.fixed:
        buffers[0] = None
    out, lse, q_bar, buffers = program(given)(
        *(case.to_owners(block, x) for x in (q, out_bar, selection)), *rows, lengths.arrays(), buffers)
    results = {name: case.to_sequence(block, x) for name, x in (("out", out), ("lse", lse), ("q", q_bar))}
    for name, layout, buffer in zip(("prefix", "own"), (pages, block), buffers, strict=True):
        if buffer is not None:
            buffer = np.asarray(buffer)
            np.testing.assert_array_equal(np.delete(buffer, case.LAYER, 0), 1, err_msg="another layer's cotangent changed")
            results[name] = case.to_sequence(layout, buffer[case.LAYER]) - 1
    return results


@jax.jit
def dense(mask, q, out_bar, prefix, own):
    """Softmax attention over the rows that `mask` [T, rows] allows, and what out_bar pulls back."""

    def attention(q, prefix, own):
        rows = jnp.concatenate([prefix, own])
        x = jnp.where(mask[:, None], jnp.einsum("thc,sc->ths", q, rows) * SCALE, -jnp.inf)
        some = mask.any(1)[:, None, None]
        p = jax.nn.softmax(jnp.where(some, x, 0)) * some
        return jnp.einsum("ths,sv->thv", p, rows[:, :V]), jax.scipy.special.logsumexp(x, -1)

    (out, lse), pull = jax.vjp(attention, q, prefix, own)
    q_bar, prefix_bar, own_bar = pull((out_bar, jnp.zeros_like(lse)))
    return {"out": out, "lse": lse, "q": q_bar, "prefix": prefix_bar, "own": own_bar}


def drawn(lengths, seed=0):
    """q, the output's cotangent, a selection and its mask [T, rows], prefix rows, own rows.

    A query selects as many of the rows as it likes, one nothing, and some the future, too, which does not count.
    """
    rng, at = np.random.default_rng(seed), lengths.keys
    q, out_bar = rng.normal(size=(case.BLOCK, H, C)), rng.normal(size=(case.BLOCK, H, V))
    selection = np.full((case.BLOCK, K), case.NONE, np.int32)
    mask = np.zeros((case.BLOCK, len(at)), bool)
    for t, position in enumerate(lengths.queries):
        real = at[at != case.NONE] if t % 5 == 1 else at[at <= position]
        number = 0 if t == 3 else min(len(real), rng.integers(1, K + 1))
        chosen = np.sort(rng.choice(real, number, replace=False))
        if t % 7 == 2:  # neighbours, so that few owners keep them
            chosen = real[-number:]
        selection[t, :number] = chosen
        mask[t] = np.isin(at, chosen) & (at <= position) & (at != case.NONE)
    return q, out_bar, selection, mask, *rng.normal(size=(2, case.ROOM, C))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("given", PROGRAMS, ids=repr)
def test_equals_dense_masked_attention(given):
    for seed, lengths in enumerate(case.LENGTHS):
        q, out_bar, selection, mask, prefix, own = drawn(lengths, seed)
        wanted = dense(mask, q, out_bar, prefix, own)
        results = run(given, lengths, q, out_bar, selection, prefix, own)
        assert ("prefix" in results) != given.fixed
        for name, x in results.items():
            np.testing.assert_allclose(x, wanted[name], rtol=1e-9, atol=1e-11, err_msg=f"{name} {lengths}")


@pytest.mark.usefixtures("x64")
def test_rounds_equal_fetch():
    lengths = case.LENGTHS[1]
    q, out_bar, selection, _, prefix, own = drawn(lengths, 6)
    rounds, fetch = (run(given, lengths, q, out_bar, selection, prefix, own) for given in PROGRAMS[4:])
    for name, x in rounds.items():
        np.testing.assert_allclose(x, fetch[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("given", PROGRAMS[2:4], ids=repr)
def test_nothing_selected(given):
    lengths = case.LENGTHS[0]
    q, out_bar, selection, _, prefix, own = drawn(lengths)
    results = run(given, lengths, q, out_bar, np.full_like(selection, case.NONE), prefix, own)
    np.testing.assert_array_equal(results.pop("lse"), -np.inf)
    for name, x in results.items():
        np.testing.assert_array_equal(x, 0, err_msg=name)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("given", PROGRAMS[4:], ids=repr)
def test_rows_that_are_not_selected_are_not_read(given):
    """Not even a NaN in one of them, nor in a row of padding, reaches a result."""
    lengths = case.LENGTHS[1]
    q, out_bar, selection, mask, prefix, own = drawn(lengths, 1)
    wanted = run(given, lengths, q, out_bar, selection, prefix, own)
    unused = np.where(mask.any(0)[:, None], 0, np.nan)
    results = run(given, lengths, q, out_bar, selection, prefix + unused[: case.ROOM], own + unused[case.ROOM :])
    assert np.isnan(unused).sum() > 2
    for name, x in results.items():
        np.testing.assert_allclose(x, wanted[name], rtol=1e-12, atol=1e-13, err_msg=name)


def abstract(room, dtype):
    """The program's arguments for a prompt of `room` tokens."""

    def shape(*size, dtype=dtype):
        return jax.ShapeDtypeStruct(size, dtype)

    lengths = {name: shape(dtype=jnp.int32) for name in vars(case.LENGTHS[0])}
    rows = shape(case.LAYERS, room, C), shape(case.LAYERS, case.ROOM, C)
    arrays = shape(case.BLOCK, H, C), shape(case.BLOCK, H, V), shape(case.BLOCK, K, dtype=jnp.int32)
    return *arrays, *rows, lengths, [shape(*x.shape, dtype=jnp.float32) for x in rows]


def test_rounds_hold_no_part_of_the_pages():
    """Rows are taken from the buffers and added to in place."""
    room = 2**16
    memory = program(PROGRAMS[2]).lower(*abstract(room, jnp.float32)).compile().memory_analysis()
    layer = 4 * C * room / 4  # bytes, of an owner
    assert memory.temp_size_in_bytes < 0.1 * layer
    # the prompt's buffer is not used, the branch's comes out where it came in
    assert memory.alias_size_in_bytes == 4 * C * case.ROOM / 4 * case.LAYERS


def test_bfloat16_has_float32_statistics_and_row_cotangents():
    out, lse, q_bar, buffers = jax.eval_shape(program(PROGRAMS[4]), *abstract(case.ROOM, jnp.bfloat16))
    assert out.dtype == q_bar.dtype == jnp.bfloat16
    assert {x.dtype for x in (lse, *buffers)} == {jnp.dtype(jnp.float32)}
