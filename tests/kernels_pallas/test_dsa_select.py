"""The running selection against a full row of scores and NumPy's stable sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.kernels_pallas import Candidates, dsa_merge, dsa_select
from longstraw_jax.kernels_pallas.dsa_select.reference import dsa_scores_reference, dsa_select_reference
from longstraw_jax.sharding import Layout, Owners, Stretch, make_mesh

Q, H, D, S, K = 5, 3, 4, 12, 7
START = 10
NONE = 2**31 - 1

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def program(block, k=K):
    """(q, w, queries, keys, length) -> candidates, on one owner."""
    mesh, spec = make_mesh(1), PartitionSpec()

    def run(q, w, queries, keys, length):
        rows = jnp.stack([jnp.full_like(keys, 1e30), keys])
        stretch = Stretch(rows, jnp.int32(1), jnp.int32(START), length, Layout(Owners.of(mesh), 3))
        return tuple(dsa_select(q, w, queries, stretch, block, Candidates.none(len(q), k, q.dtype)))

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def by_hand(q, w, queries, keys, length, k=K):
    """(scores [Q, k], positions [Q, k]), a pair at a time."""
    every = []
    for q_t, w_t, t in zip(q, w, queries, strict=True):
        row = [(float(sum(w_t[h] * max(0.0, q_t[h] @ keys[s] / 2) for h in range(H))), START + s)
               for s in range(length) if START + s <= t]
        row.sort(key=lambda pair: -pair[0])  # stable: the lowest position first
        every.append((row + k * [(-np.inf, NONE)])[:k])
    return tuple(np.moveaxis(np.array(every), 2, 0))


def drawn(kind, seed=0):
    """Queries, weights of both signs, and keys; `integers` are exact in any order of summation, and often tie."""
    rng = np.random.default_rng(seed)
    shapes = (Q, H, D), (Q, H), (S, D)
    if kind == "integers":
        return [rng.integers(-1, 2, size).astype(float) for size in shapes]
    return [rng.normal(size=size) for size in shapes]


QUERIES = np.array([START - 1, START, START + 6, START + 7, START + 40])


@pytest.mark.parametrize("block", [1, 3, 5, 12, 100])
@pytest.mark.parametrize("kind", ["integers", "normal"])
def test_equals_a_stable_sort(kind, block):
    for length in (S, S - 1, 1, 0):
        q, w, keys = drawn(kind, length)
        wanted = by_hand(q, w, QUERIES, keys, length)
        scores, positions = program(block)(q, w, QUERIES, keys, jnp.int32(length))
        np.testing.assert_array_equal(positions, wanted[1])
        np.testing.assert_allclose(scores, wanted[0], rtol=1e-12, atol=1e-14)
        assert positions.dtype == np.int32


def test_the_integers_do_tie():
    q, w, keys = drawn("integers", S)
    scores, _ = by_hand(q, w, QUERIES, keys, S)
    assert (np.diff(scores[-1]) == 0).sum() > 1


@pytest.mark.parametrize("k", [1, S, S + 4])
def test_any_number_to_select(k):
    q, w, keys = drawn("normal", k)
    _, positions = program(5, k)(q, w, QUERIES, keys, jnp.int32(S))
    np.testing.assert_array_equal(positions, by_hand(q, w, QUERIES, keys, S, k)[1])


@pytest.mark.parametrize("block", [1, 4])
def test_zeros_of_either_sign_tie(block):
    """Relu cuts every product; weights of both signs make zeros of both signs."""
    q, keys = np.ones((Q, H, D)), -np.ones((S, D))
    w = np.tile(np.array([[-1.0], [1.0], [-1.0], [1.0], [-1.0]]), (1, H))
    _, positions = program(block)(q, w, np.full(Q, START + S), keys, jnp.int32(S))
    np.testing.assert_array_equal(positions, np.tile(START + np.arange(K), (Q, 1)))


def test_merge_lets_zeros_of_either_sign_tie():
    scores = jnp.array([[[0.0, -0.0]], [[-0.0, 0.0]]])
    merged = dsa_merge(Candidates(scores, jnp.array([[[1, 4]], [[0, 3]]], jnp.int32)))
    np.testing.assert_array_equal(merged.positions, [[0, 1]])


@pytest.mark.parametrize("kind", ["integers", "normal"])
def test_merge_is_the_selection_from_the_union(kind):
    q, w, keys = drawn(kind, 3)
    every, at = [jnp.asarray(x) for x in (q, w, QUERIES)], START + jnp.arange(S)
    parts = [dsa_select_reference(*every, jnp.asarray(keys[first::3]), at[first::3], K) for first in (2, 0, 1)]
    merged = dsa_merge(Candidates(*(jnp.stack(x) for x in zip(*parts, strict=True))))
    for given, wanted in zip(merged, by_hand(q, w, QUERIES, keys, S), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-12)


def test_scores_of_bfloat16_are_float32():
    rng = np.random.default_rng(5)
    q, w, keys = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((Q, H, 64), (Q, H), (S, 64)))
    wanted = dsa_scores_reference(*(x.astype(jnp.float64) for x in (q, w, keys)))
    wanted = np.sort(np.asarray(wanted), 1)[:, ::-1][:, :K]
    scores, _ = program(5)(q, w, np.full(Q, START + S), keys, jnp.int32(S))
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, wanted, atol=2e-6)
