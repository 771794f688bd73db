"""Rotary position embedding as rotations of the complex plane."""

import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.models.layers.rope import rotate_half_split

ROTARY, HEAD, THETA = 6, 10, 1e4


def rotated(x, positions, dtype=np.float64):
    """Dimensions j and j + ROTARY / 2 are one complex number, turned by position * theta^(-2j / ROTARY)."""
    half = ROTARY // 2
    frequency = 1 / THETA ** (np.arange(0, ROTARY, 2, dtype=dtype) / ROTARY)
    turn = np.exp(1j * (positions.astype(dtype)[:, None] * frequency).astype(np.float64))[:, None]
    turned = (x[..., :half] + 1j * x[..., half:ROTARY]) * turn
    return np.concatenate([turned.real, turned.imag, x[..., ROTARY:]], -1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_rotations(size):
    x = size * np.random.default_rng(0).normal(size=(4, 3, HEAD))
    positions = np.array([0, 1, 7, 2_097_151])
    given = rotate_half_split(jnp.asarray(x), jnp.asarray(positions), ROTARY, THETA)
    np.testing.assert_allclose(given, rotated(x, positions), rtol=1e-9, atol=size * 1e-9)
    np.testing.assert_array_equal(given[0], x[0])
    np.testing.assert_array_equal(given[..., ROTARY:], x[..., ROTARY:])


@pytest.mark.usefixtures("x64")
def test_scores_depend_on_the_distance_alone():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, HEAD))

    def score(i, j):
        turned = [rotate_half_split(jnp.asarray(x), jnp.array([at]), ROTARY, THETA) for x, at in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 3) == pytest.approx(score(105, 103), rel=1e-10)
    assert score(5, 3) != pytest.approx(score(3, 5), rel=1e-3)


def test_float32_angles_are_those_of_pytorch():
    """At the published size, two million positions on: there the last digit of a float32 frequency shows."""
    torch = pytest.importorskip("torch")
    rotary, theta, position = 64, 1e7, 2_097_151
    x = np.random.default_rng(2).normal(size=(1, 2, rotary)).astype(np.float32)
    given = rotate_half_split(jnp.asarray(x), jnp.array([position]), rotary, theta)
    assert given.dtype == jnp.float32
    angles = torch.tensor(position).float() * (1.0 / (theta ** (torch.arange(0, rotary, 2, dtype=torch.float) / rotary)))
    turn = np.exp(1j * angles.numpy().astype(np.float64))
    turned = (x[..., : rotary // 2] + 1j * x[..., rotary // 2 :]) * turn
    np.testing.assert_allclose(given, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)


def test_bfloat16_stays_bfloat16():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 1, HEAD)), jnp.bfloat16)
    positions = np.array([3, 100_001])
    given = rotate_half_split(x, jnp.asarray(positions), ROTARY, THETA)
    assert given.dtype == jnp.bfloat16
    wanted = rotated(np.asarray(x, np.float64), positions, np.float32)
    np.testing.assert_allclose(given.astype(jnp.float32), wanted, atol=3e-2)
