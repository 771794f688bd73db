"""The merge's kernels, interpreted, against the formula in float64: outputs and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from longstraw_jax.kernels_pallas import lse_merge
from longstraw_jax.sharding import Owners, make_mesh

# [N, T, H, D]: fewer partials than, exactly, and more than are in a straight line of code; widths beside a power of two; a tile
# of rows less than, exactly and more than there are
SIZES = [(1, 1, 1, 1), (3, 5, 2, 15), (4, 8, 2, 128), (5, 43, 3, 16), (9, 17, 1, 65), (6, 16, 8, 16)]


@functools.cache
def program(implementation="pallas"):
    """(partials, lse, cotangents) -> (out, lse, cotangents of partials and lse)."""

    def run(partials, lse, out_bar, lse_bar):
        results, pull = jax.vjp(lambda *x: lse_merge(*x, implementation), partials, lse)
        return *results, *pull((out_bar, lse_bar))

    return jax.jit(run)


def drawn(size, seed=0, empty=0.3, scale=3.0):
    """Partials and LSE, some of them empty and holding NaN; one row in five is empty everywhere. And cotangents."""
    rng = np.random.default_rng(seed)
    partials, lse = rng.normal(size=size), rng.normal(size=size[:3]) * scale
    lse[rng.random(lse.shape) < empty] = -np.inf
    lse[:, rng.random(lse.shape[1:]) < empty / 1.5] = -np.inf
    partials[np.isinf(lse)] = np.nan
    return [np.float32(x) for x in (partials, lse, rng.normal(size=size[1:]), rng.normal(size=size[1:3]))]


def by_hand(partials, lse, out_bar, lse_bar):
    """The formulas of the merge and of its transpose, in NumPy and float64."""
    partials, lse, out_bar, lse_bar = (np.asarray(x, np.float64) for x in (partials, lse, out_bar, lse_bar))
    partials = np.where(np.isinf(lse)[..., None], 0, partials)
    with np.errstate(divide="ignore", invalid="ignore"):
        merged = np.logaddexp.reduce(lse, 0)
        p = np.where(np.isinf(merged), 0, np.exp(lse - merged))
    out = (p[..., None] * partials).sum(0)
    lse_grad = p * ((out_bar * (partials - out)).sum(-1) + lse_bar)
    return out, merged, p[..., None] * out_bar, lse_grad


def check(results, arguments, rtol=2e-5, atol=2e-5):
    for name, x, wanted in zip(("out", "lse", "partials", "lse gradient"), results, by_hand(*arguments), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), wanted, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_formula(size):
    arguments = drawn(size)
    check(program()(*arguments), arguments)


def test_the_rule_is_the_references_derivative():
    arguments = drawn((5, 6, 2, 7), seed=3)
    for a, b in zip(program()(*arguments), program("xla")(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    check(program("auto")(*arguments), arguments)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.97]), st.sampled_from([0.1, 3.0, 60.0]))
def test_any_numbers(seed, empty, scale):
    """One size, so that it is compiled once; LSE far apart, almost nothing or everything empty."""
    arguments = drawn((5, 4, 3, 6), seed, empty, scale)
    check(program()(*arguments), arguments, atol=1e-4)


def test_all_rows_empty():
    partials, lse, *bars = drawn((3, 4, 2, 5))
    out, merged, *gradients = program()(np.full_like(partials, np.nan), np.full_like(lse, -np.inf), *bars)
    assert (np.asarray(out) == 0).all() and (np.asarray(merged) == -np.inf).all()
    assert all((np.asarray(g) == 0).all() for g in gradients)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_partials_are_merged_in_float32(dtype):
    partials, lse, *bars = drawn((40, 3, 2, 24), seed=5, empty=0.1)
    arguments = jnp.asarray(partials, dtype), lse, *bars
    out, merged, *gradients = program()(*arguments)
    assert [x.dtype for x in (out, merged, *gradients)] == [jnp.float32, jnp.float32, dtype, jnp.float32]
    wanted = by_hand(*arguments)
    for x, y in zip((out, merged, gradients[1]), (wanted[0], wanted[1], wanted[3]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(gradients[0], np.float64), wanted[2], rtol=1e-2, atol=1e-4)


def test_inside_the_engines_transformations():
    """Under shard_map on eight owners, in a map under checkpoint, differentiated through the exchange."""
    mesh = make_mesh(8)
    owners = Owners.of(mesh)
    partials, lse, *_ = drawn((8, 16, 2, 5), seed=7)

    def loss(implementation, partials, lse):
        @jax.checkpoint
        def tile(x):
            return lse_merge(*map(owners.exchange, x), implementation)

        # [owner, tile, token of the tile, ..]: an owner's partials for the tokens of all
        out, merged = jax.lax.map(tile, (partials.reshape(8, 2, 1, 2, 5).swapaxes(0, 1), lse.reshape(8, 2, 1, 2).swapaxes(0, 1)))
        return owners.sum((out**2).sum() + jnp.where(jnp.isfinite(merged), merged, 0).sum())

    def run(implementation):
        f = jax.value_and_grad(lambda *x: loss(implementation, *x), (0, 1))
        spec = PartitionSpec(None, mesh.axis_names)
        mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=(PartitionSpec(), (spec, spec)), check_vma=False)
        return jax.tree.leaves(jax.jit(mapped)(partials, lse))

    for a, b in zip(run("pallas"), run("xla"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
