"""The merge of partial attentions against one attention over all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.kernels_pallas import lse_merge

T, H, D = 4, 3, 5
CUTS = [0, 6, 6, 7, 13]  # four owners' keys of 13; the second owner has none


def scores_and_values(seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(T, H, CUTS[-1])) * scale, rng.normal(size=(CUTS[-1], H, D))


def attention(scores, values):
    """(output [T, H, D], LSE [T, H]) over all keys."""
    lse = jax.scipy.special.logsumexp(scores, -1)
    return jnp.einsum("ths,shd->thd", jnp.exp(scores - lse[..., None]), values), lse


def partials(scores, values):
    """What the owners would send: an owner without keys sends anything finite, and -inf."""
    parts = []
    for first, last in zip(CUTS, CUTS[1:], strict=False):
        empty = jnp.full((T, H, D), 7.0, scores.dtype), jnp.full((T, H), -jnp.inf, scores.dtype)
        parts.append(attention(scores[..., first:last], values[first:last]) if last > first else empty)
    return tuple(map(jnp.stack, zip(*parts, strict=True)))


@pytest.mark.usefixtures("x64")
def test_equals_one_attention():
    scores, values = map(jnp.asarray, scores_and_values())
    merged = jax.jit(lambda s, v: lse_merge(*partials(s, v)))(scores, values)
    for given, wanted in zip(merged, attention(scores, values), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_gradient():
    scores, values = map(jnp.asarray, scores_and_values(1))
    rng = np.random.default_rng(2)
    cotangent = jnp.asarray(rng.normal(size=(T, H, D))), jnp.asarray(rng.normal(size=(T, H)))

    def pull(f):
        return jax.jit(lambda *xs: jax.vjp(f, *xs)[1](cotangent))(scores, values)

    for a, b in zip(pull(lambda s, v: lse_merge(*partials(s, v))), pull(attention), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_row_without_any_key():
    out, lse = jax.jit(partials)(*map(jnp.asarray, scores_and_values()))
    lse = lse.at[:, 2, 1].set(-jnp.inf)
    merged, total = lse_merge(out, lse)
    np.testing.assert_array_equal(merged[2, 1], 0)
    assert total[2, 1] == -np.inf
    assert np.isfinite(np.delete(np.asarray(merged).reshape(T * H, D), 2 * H + 1, 0)).all()
    gradients = jax.jit(jax.grad(lambda out, lse: lse_merge(out, lse)[0].sum(), (0, 1)))(out, lse)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_large_scores(level):
    out, lse = jax.jit(partials)(*map(jnp.float32, scores_and_values()))
    lse = jnp.round(lse * 64) / 64  # so that float32 holds the shifted ones exactly
    (given, given_lse), (wanted, wanted_lse) = lse_merge(out, lse + level), lse_merge(out, lse)
    np.testing.assert_allclose(given, wanted, rtol=1e-6)
    np.testing.assert_allclose(given_lse, wanted_lse + level, rtol=1e-6)


def test_bfloat16_partials_are_merged_in_float32():
    # With a bfloat16 numerator or denominator the error is about 1e-2.
    rng = np.random.default_rng(3)
    out = jnp.asarray(rng.normal(size=(64, T, H, D)), jnp.bfloat16)
    lse = jnp.asarray(rng.normal(size=(64, T, H)), jnp.float32)
    merged, total = lse_merge(out, lse)
    assert merged.dtype == total.dtype == jnp.float32
    weight = np.exp(np.asarray(lse, np.float64))
    wanted = (np.asarray(out, np.float64) * weight[..., None]).sum(0) / weight.sum(0)[..., None]
    np.testing.assert_allclose(merged, wanted, atol=1e-6)
    np.testing.assert_allclose(total, np.log(weight.sum(0)), rtol=1e-6)
