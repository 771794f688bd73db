"""Linear layers: the adapter's formula, and a weight that is gathered from its shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longstraw_jax.config import LoraConfig
from longstraw_jax.models.layers.linear import Adapter, Linear
from longstraw_jax.sharding import Owners, PlacementRules

ONE = Owners((), 1)
TOKENS = 3


def bound(linear, **values):
    graph, _ = nnx.split(linear)
    return nnx.merge(graph, {name: jnp.asarray(value) for name, value in values.items()})


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("lora", "scale"), [
    (None, 0),
    (LoraConfig(rank=2, alpha=5.0), 5 / 2),
    (LoraConfig(rank=4, alpha=6.0, rank_stabilized=True), 6 / 2),  # divided by the root of the rank
])
def test_formula(lora, scale):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(TOKENS, 7)), rng.normal(size=(5, 7))
    linear = Linear(7, 5, dtype="float64", lora=lora)
    if lora is None:
        np.testing.assert_allclose(bound(linear, weight=w)(jnp.asarray(x), ONE), x @ w.T, rtol=1e-12)
        return
    a, b = rng.normal(size=(lora.rank, 7)), rng.normal(size=(5, lora.rank))
    given = bound(linear, weight=w, lora_A=a, lora_B=b)(jnp.asarray(x), ONE)
    np.testing.assert_allclose(given, x @ (w + scale * b @ a).T, rtol=1e-12)


def test_adapters_are_wide_and_replicated():
    linear = Linear(8, 12, dtype="bfloat16", lora=LoraConfig(rank=4))
    _, adapters, base = nnx.split(linear, Adapter, ...)
    assert sorted(name for name, in dict(nnx.to_flat_state(adapters))) == ["lora_A", "lora_B"]
    assert [name for name, in dict(nnx.to_flat_state(base))] == ["weight"]
    rules = PlacementRules(Owners(("context",), 4))
    for parameter, shape, dtype in ((linear.lora_A, (4, 8), "float32"), (linear.lora_B, (12, 4), "float32"),
                                    (linear.weight, (12, 8), "bfloat16")):
        assert (parameter.shape, parameter.dtype) == (shape, dtype)
        split = rules.split_axis(parameter.shape, parameter.get_metadata("axes"))
        assert split == (0 if parameter is linear.weight else None)
    assert linear(jnp.ones((TOKENS, 8), jnp.bfloat16), ONE).dtype == jnp.bfloat16


def test_first_adapter_changes_nothing():
    linear = Linear(8, 12, dtype="float32", lora=LoraConfig(rank=4))
    rng = np.random.default_rng(0)
    a, b = (parameter.get_metadata("init")(rng, parameter.shape) for parameter in (linear.lora_A, linear.lora_B))
    assert not b.any()
    assert 0.5 * 8**-0.5 < np.abs(a).max() <= 8**-0.5


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("features_in", "features_out", "axis"), [(7, 12, 0), (12, 7, 1), (7, 9, None)])
def test_gathered_weight_and_its_gradient(features_in, features_out, axis, mesh, per_owner):
    """A shard's gradient comes back summed over all owners' tokens, a replicated weight's does not."""
    devices, rng = mesh(4), np.random.default_rng(1)
    owners = Owners.of(devices)
    linear = Linear(features_in, features_out, dtype="float64")
    spec = PlacementRules(owners).spec(linear.weight.shape, linear.weight.get_metadata("axes"))
    assert (len(spec) - 1 if len(spec) else None) == axis

    def run(w, x, cotangent):
        y, pull = jax.vjp(lambda w, x: bound(linear, weight=w)(x, owners), w, x)
        w_bar, x_bar = pull(cotangent)
        return y, owners.sum(w_bar) if axis is None else w_bar, x_bar

    w, x = rng.normal(size=linear.weight.shape), rng.normal(size=(4 * TOKENS, features_in))
    cotangent = rng.normal(size=(4 * TOKENS, features_out))
    tokens = owners.spec
    y, w_bar, x_bar = per_owner(run, devices, (spec, tokens, tokens), (tokens, spec, tokens))(w, x, cotangent)
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(w_bar, cotangent.T @ x, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(x_bar, cotangent @ w, rtol=1e-11, atol=1e-13)
