"""The norms against their formulas, at a size where the epsilon shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longstraw_jax.models.layers.norms import GatedNorm, ZeroCentredNorm

EPS = 1e-6
SHAPES = [(5, 8), (3, 2, 8)]  # tokens; tokens and heads


def bound(norm, weight):
    graph, _ = nnx.split(norm)
    return nnx.merge(graph, {"weight": weight})


def drawn(shape, size):
    rng = np.random.default_rng(0)
    return size * rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=shape[-1])


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("shape", SHAPES)
def test_formulas(shape, size):
    x, gate, w = drawn(shape, size)
    centred = bound(ZeroCentredNorm(8, EPS, dtype="float64"), jnp.asarray(w))(jnp.asarray(x))
    np.testing.assert_allclose(centred, rms(x) * (1 + w), rtol=1e-12)
    gated = bound(GatedNorm(8, EPS, dtype="float64"), jnp.asarray(w))(jnp.asarray(x), jnp.asarray(gate))
    np.testing.assert_allclose(gated, w * rms(x) * silu(gate), rtol=1e-12)


def test_rounding_of_bfloat16():
    """Where the reference casts: the zero-centred norm after its weight, the gated one before it and after the gate."""
    x, gate, w = (jnp.asarray(a, jnp.bfloat16) for a in drawn((64, 8), 1.0))
    wide, wide_gate, wide_w = (np.asarray(a, np.float32) for a in (x, gate, w))

    def narrow(a):
        return jnp.asarray(a, jnp.bfloat16)

    centred = bound(ZeroCentredNorm(8, EPS, dtype="bfloat16"), w)(x)
    gated = bound(GatedNorm(8, EPS, dtype="bfloat16"), w)(x, gate)
    assert centred.dtype == gated.dtype == jnp.bfloat16
    wanted = narrow(rms(wide) * (1 + wide_w))
    wanted_gated = narrow(np.asarray(w[None] * narrow(rms(wide)), np.float32) * silu(wide_gate))
    for given, exact in ((centred, wanted), (gated, wanted_gated)):
        same = np.asarray(given) == np.asarray(exact)
        assert same.mean() > 0.99  # float32 sums in another order may tip a rounding


def test_fresh_norms_scale_by_one():
    rng = np.random.default_rng(0)
    for norm, value in ((ZeroCentredNorm(8, EPS, dtype="float32"), 0), (GatedNorm(8, EPS, dtype="float32"), 1)):
        np.testing.assert_array_equal(norm.weight.get_metadata("init")(rng, (8,)), value)


def test_gradient_of_zeros_is_finite():
    norm = bound(ZeroCentredNorm(8, EPS, dtype="float32"), jnp.zeros(8))
    assert np.isfinite(jax.grad(lambda x: norm(x).sum())(jnp.zeros((2, 8)))).all()
