"""The chunked delta rule against the plain recurrence, outputs and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.models.layers.delta_rule import delta_rule_chunked, delta_rule_recurrent

KEY_HEADS, VALUE_HEADS, K, V = 2, 6, 5, 7
NAMES = ("q", "k", "v", "g", "beta", "state")


def inputs(tokens, seed=0):
    """q, k, v, g, beta, state: unit keys, decays from nearly none to a factor of e^-3 or so."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, tokens, KEY_HEADS, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(tokens, VALUE_HEADS, V))
    g = -np.exp(rng.normal(size=(tokens, VALUE_HEADS)) - 1)
    beta = rng.uniform(size=(tokens, VALUE_HEADS))
    return tuple(map(jnp.asarray, (q, k, v, g, beta, rng.normal(size=(VALUE_HEADS, K, V)))))


def recurrent(q, k, *rest):
    """The oracle with as many key heads as value heads: value head h reads key head h // 3."""
    q, k = (jnp.repeat(x, VALUE_HEADS // KEY_HEADS, axis=1) for x in (q, k))
    return delta_rule_recurrent(q, k, *rest)


def by_hand(q, k, v, g, beta, state):
    """The recurrence in numpy, head by head, so that the oracle itself is held against something."""
    out, state = np.zeros(v.shape), np.array(state)
    for t in range(v.shape[0]):
        for h in range(v.shape[1]):
            key, query = k[t, h // 3], q[t, h // 3]
            decayed = state[h] * np.exp(g[t, h])
            state[h] = decayed + np.outer(key, beta[t, h] * (v[t, h] - decayed.T @ key))
            out[t, h] = state[h].T @ query
    return out, state


@functools.partial(jax.jit, static_argnums=0)
def forward_and_backward(rule, xs, cotangent):
    out, pull = jax.vjp(rule, *xs)
    return out, pull(cotangent)


@functools.cache
def chunked(chunk):
    return functools.partial(delta_rule_chunked, chunk=chunk)


@pytest.mark.usefixtures("x64")
def test_recurrence_by_hand():
    xs = inputs(9)
    for given, wanted in zip(jax.jit(recurrent)(*xs), by_hand(*map(np.asarray, xs)), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("tokens", "chunk"), [
    (1, 64), (63, 64), (64, 64), (65, 64), (127, 64),
    (7, 3), (8, 4), (5, 1),
    (131, 2),  # three groups of 32 chunks, the last one ragged
])
def test_chunked_equals_recurrent(tokens, chunk):
    xs, rng = inputs(tokens), np.random.default_rng(1)
    cotangent = jnp.asarray(rng.normal(size=(tokens, VALUE_HEADS, V))), jnp.asarray(rng.normal(size=(VALUE_HEADS, K, V)))
    given, given_bar = forward_and_backward(chunked(chunk), xs, cotangent)
    wanted, wanted_bar = forward_and_backward(recurrent, xs, cotangent)
    for a, b in zip(given, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    for name, a, b in zip(NAMES, given_bar, wanted_bar, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cut", [1, 4, 13])
def test_two_segments_are_one(cut):
    *xs, state = inputs(21)
    run = jax.jit(chunked(4))
    whole, last = run(*xs, state)
    first, between = run(*(x[:cut] for x in xs), state)
    second, end = run(*(x[cut:] for x in xs), between)
    np.testing.assert_allclose(np.concatenate([first, second]), whole, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(end, last, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_a_token_that_neither_writes_nor_forgets_leaves_the_state_alone():
    q, k, v, g, beta, state = inputs(10)
    k, g, beta = k.at[6:].set(0), g.at[6:].set(0), beta.at[6:].set(0)
    _, padded = jax.jit(chunked(4))(q, k, v, g, beta, state)
    _, plain = jax.jit(chunked(4))(*(x[:6] for x in (q, k, v, g, beta)), state)
    np.testing.assert_allclose(padded, plain, rtol=1e-13)


@pytest.mark.parametrize(("decay", "tolerance"), [(-50.0, 1e-4), (-1e4, 5e-2)])
def test_strong_decay(decay, tolerance):
    # exp of a positive sum of such decays would overflow, and its gradient be NaN. Within a chunk decays are differences of
    # cumulative sums, as in the PyTorch reference: beside -1e4, float32 leaves the weak ones three digits.
    q, k, v, g, beta, state = map(jnp.float32, inputs(40))
    xs = (q, k, v, g.at[::3].set(decay), beta, state)
    cotangent = jnp.ones(v.shape, v.dtype), jnp.ones(state.shape, v.dtype)
    given, given_bar = forward_and_backward(chunked(16), xs, cotangent)
    wanted, wanted_bar = forward_and_backward(recurrent, xs, cotangent)
    for a, b in zip((*given, *given_bar), (*wanted, *wanted_bar), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 5)


def backward_bytes(tokens, heads=2, size=128):
    """Temporary memory of the compiled backward pass, in float32."""
    shapes = [(tokens, heads, size)] * 3 + [(tokens, heads)] * 2 + [(heads, size, size)]
    xs = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    compiled = forward_and_backward.lower(chunked(64), xs, (xs[2], xs[5])).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_backward_memory():
    short, long, very_long = map(backward_bytes, (512, 1024, 16384))
    assert short < long < 2.5 * short
    # a recurrence that is differentiated token by token keeps every state: T * K * V * H * 4 bytes
    assert long < 1024 * 128 * 128 * 2 * 4 / 5
    # one group of 32 chunks, 2048 tokens, and the groups' entry states
    assert very_long < 3 * long
