"""Declaring parameters: shape, dtype, logical axes and first value together, so that one abstract tree tells all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from longstraw_jax.models.base import Packed

Init = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


class Fixed(nnx.Param):
    """A parameter that is never trained, not even where all are: no gradient reaches it."""


def parameter(
    shape: tuple[int, ...], dtype, axes: tuple[str | None, ...], init: Init, kind: type[nnx.Param] = nnx.Param,
    packed: Packed | None = None,
) -> nnx.Param:
    """A parameter of an abstract module. Its value is made elsewhere, where it will live (see `models.parameters`)."""
    return kind(jnp.zeros(shape, dtype), axes=axes, init=init, packed=packed)


@dataclass(frozen=True)
class Constant:
    value: float

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, self.value)


@dataclass(frozen=True)
class Normal:
    std: float

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return self.std * rng.standard_normal(shape)


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high), or the logarithm of such numbers."""

    low: float
    high: float
    log: bool = False

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.uniform(self.low, self.high, shape)
        return np.log(x) if self.log else x
