"""The collectives, values and transposes, on one axis and on two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.sharding import Owners

MESHES = [(1, 1), (2, 1), (8, 1), (1, 4), (2, 3)]
pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(params=MESHES, ids=lambda degrees: "x".join(map(str, degrees)))
def on_owners(request, mesh, per_owner):
    """run(f, x, out=None): f(owners, x[i]) on owner i; results stacked over the owners."""
    devices = mesh(*request.param)
    owners = Owners.of(devices)

    def run(f, *arrays):
        program = per_owner(lambda *xs: f(owners, *(x[0] for x in xs))[None], devices, owners.spec, owners.spec)
        return np.asarray(program(*arrays))

    run.owners = owners
    return run


def test_of_mesh(on_owners):
    owners = on_owners.owners
    assert owners == Owners(("context", "expert"), owners.count)
    assert hash(owners) == hash(Owners(("context", "expert"), owners.count))
    assert owners.spec == PartitionSpec(("context", "expert"))
    numbers = on_owners(lambda owners, x: x + owners.index(), jnp.zeros(owners.count, int))
    np.testing.assert_array_equal(numbers, np.arange(owners.count))


def test_along_some_axes(mesh):
    devices = mesh(2, 3)
    assert Owners.of(devices, "expert") == Owners(("expert",), 3)
    assert Owners.of(devices, "context", "expert") == Owners.of(devices) == Owners(("context", "expert"), 6)


@pytest.mark.parametrize(("spec", "wanted"), [
    (PartitionSpec(), (("context", "expert"), 6)),
    (PartitionSpec(None, "expert"), (("context",), 2)),
    (PartitionSpec(("context",), None), (("expert",), 3)),
    (PartitionSpec(None, ("context", "expert")), ((), 1)),
    (PartitionSpec("expert", "context"), ((), 1)),
])
def test_holders_of_copies(spec, wanted, mesh, per_owner):
    devices, seen = mesh(2, 3), []

    def look(x):
        seen.append(Owners.of(devices).copies(spec))
        return x

    per_owner(look, devices, PartitionSpec(), PartitionSpec()).trace(jnp.zeros(1))
    assert seen == [Owners(*wanted)]


@pytest.mark.parametrize("axis", [0, 1])
def test_gather_and_its_transpose(on_owners, axis):
    n, rng = on_owners.owners.count, np.random.default_rng(0)
    x = rng.normal(size=(n, 2, 3, 4))
    whole = np.concatenate(list(x), axis)
    given = on_owners(lambda owners, x: owners.gather(x, axis), x)
    np.testing.assert_array_equal(given, np.broadcast_to(whole, (n, *whole.shape)))

    cotangent = rng.normal(size=(n, *whole.shape))

    def pull(owners, x, cotangent):
        return jax.vjp(lambda x: owners.gather(x, axis), x)[1](cotangent)[0]

    np.testing.assert_allclose(on_owners(pull, x, cotangent), np.stack(np.split(cotangent.sum(0), n, axis)), rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_scatter_sum(on_owners, axis):
    n = on_owners.owners.count
    x = np.random.default_rng(1).normal(size=(n, 2 * n, 3 * n, 4))
    given = on_owners(lambda owners, x: owners.scatter_sum(x, axis), x)
    np.testing.assert_allclose(given, np.stack(np.split(x.sum(0), n, axis)), rtol=1e-12, atol=1e-12)


def test_exchange_and_its_transpose(on_owners):
    n, rng = on_owners.owners.count, np.random.default_rng(2)
    x, cotangent = rng.normal(size=(2, n, n, 3, 4))
    np.testing.assert_array_equal(on_owners(lambda owners, x: owners.exchange(x), x), x.swapaxes(0, 1))

    def pull(owners, x, cotangent):
        return jax.vjp(owners.exchange, x)[1](cotangent)[0]

    np.testing.assert_array_equal(on_owners(pull, x, cotangent), cotangent.swapaxes(0, 1))


def test_sum_and_max(on_owners):
    n = on_owners.owners.count
    x = np.random.default_rng(3).normal(size=(n, 5))
    summed = on_owners(lambda owners, x: owners.sum({"x": x})["x"], x)
    np.testing.assert_allclose(summed, np.broadcast_to(x.sum(0), x.shape), rtol=1e-12)
    np.testing.assert_array_equal(on_owners(lambda owners, x: owners.max(x), x), np.broadcast_to(x.max(0), x.shape))
