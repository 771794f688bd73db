"""A stretch's rows: their positions, where a position's row is, and the rows of all owners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.sharding import NO_POSITION, Layout, Owners, Stretch, make_mesh

OWNERS, GRANULE, SLOTS, START, LENGTH, LAYER = 4, 3, 12, 5, 34, 1
ROOM = OWNERS * SLOTS
POSITIONS = np.array([START - 1, START, START + 1, START + GRANULE, START + LENGTH - 1, START + LENGTH, NO_POSITION])


def program(f):
    """`f(stretch, last)` on every owner, as a function of `last`; row values are their positions, whatever their owner."""
    mesh = make_mesh(OWNERS)
    layout = Layout(Owners.of(mesh), GRANULE)

    def run(last):
        offsets = layout.offsets(jnp.arange(SLOTS), layout.owners.index())
        rows = jnp.full((2, SLOTS, 2), -1.0).at[LAYER].set((START + offsets.astype(float))[:, None] * jnp.array([[1.0, 10.0]]))
        return jax.tree.map(lambda x: x[None], f(Stretch(rows, jnp.int32(LAYER), jnp.int32(START), jnp.int32(LENGTH), layout), last))

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(mesh.axis_names), check_vma=False))


def real(positions):
    return (positions >= START) & (positions < START + LENGTH)


def test_own_rows():
    positions, rows, (held, owner, at) = program(
        lambda s, _: (s.positions(jnp.int32(2), SLOTS - 2), s.read(jnp.int32(2), SLOTS - 2), s.find(jnp.asarray(POSITIONS))))(0)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(positions, np.where(real(rows[..., 0]), rows[..., 0], NO_POSITION))
    assert sorted(positions[positions != NO_POSITION]) != list(range(START, START + LENGTH))  # the first two of each are missing
    for owned, keeper, row in zip(held, owner, at, strict=True):
        np.testing.assert_array_equal(owned, real(POSITIONS))
        for p, o, r in zip(POSITIONS[owned], keeper[owned], row[owned], strict=True):
            assert r < 2 or positions[o, r - 2] == p


@functools.cache
def fetched(block):
    def f(s, last):
        s = s.fetch(block, last)
        beyond = s.take(jnp.array([s.count, 2**30]))
        return s.positions(jnp.int32(0), s.count), s.read(jnp.int32(0), s.count), s.covering(last), *s.find(jnp.asarray(POSITIONS)), beyond

    return program(f)


@pytest.mark.parametrize("block", [1, 5, 100])
@pytest.mark.parametrize("last", [START - 1, START, START + 20, START + LENGTH + 9])
def test_fetched_rows(block, last):
    positions, rows, covering, held, keeper, at, beyond = (np.asarray(x) for x in fetched(block)(jnp.int32(last)))
    assert not keeper.any() and not beyond.any() and (positions == positions[:1]).all() and (rows == rows[:1]).all()
    np.testing.assert_array_equal(held[0], real(POSITIONS))
    for p, row in zip(POSITIONS[held[0]], at[0][held[0]], strict=True):
        if p <= last:
            assert row < covering[0] and positions[0, row] == p
            np.testing.assert_array_equal(rows[0, row], [p, 10 * p])
    seen = positions[0, : covering[0]]
    seen = seen[seen != NO_POSITION]
    assert set(range(START, min(last + 1, START + LENGTH))) <= set(seen)
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("block", [2, 100])
def test_add_back_is_the_transpose_of_fetch(block):
    """Owner o brings (o + 1) times each fetched row: they come back summed, where they were, on top of what was there."""

    def back(s, last):
        fetched = s.fetch(block, last)
        return s.rows, s.add_back(jnp.ones_like(s.rows), fetched.rows * (s.layout.owners.index() + 1), block, last)

    rows, added = (np.asarray(x) for x in program(back)(jnp.int32(START + LENGTH)))
    np.testing.assert_array_equal(added[:, 1 - LAYER], 1)
    rows, added = (x[:, LAYER][real(rows[:, LAYER, :, 0])] for x in (rows, added))
    assert len(rows) == LENGTH
    np.testing.assert_allclose(added, 1 + rows * sum(range(1, OWNERS + 1)))
