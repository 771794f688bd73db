"""Reading and writing entries of stacked arrays at traced places; inside a loop's carry all of it happens in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any


def _start(x: jax.Array, index: tuple) -> tuple[jax.Array, ...]:
    """A full start index; of one type, as the slicing primitives ask (they see int32 and int64 mixed under x64)."""
    return tuple(jnp.asarray(i, jnp.int32) for i in (*index, *[0] * (x.ndim - len(index))))


def read(x: jax.Array, index: tuple, shape: tuple[int, ...]) -> jax.Array:
    """The part of `x` that begins at `index` (0 in the dimensions it leaves out)."""
    return lax.dynamic_slice(x, _start(x, index), shape)


def write(x: jax.Array, part: jax.Array, index: tuple) -> jax.Array:
    """`x` with `part`, of as many dimensions, written at `index`, in x's dtype."""
    return lax.dynamic_update_slice(x, part.astype(x.dtype), _start(x, index))


def entry(tree: Tree, *index) -> Tree:
    """The entry at leading indices of every array."""
    for i in index:
        tree = jax.tree.map(lambda x, i=i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)
    return tree


def set_entry(tree: Tree, values: Tree, *index) -> Tree:
    """`tree` with `values` at leading indices of every array, in the tree's dtypes."""
    return jax.tree.map(lambda x, v: write(x, v.reshape((1,) * len(index) + v.shape), index), tree, values)


def add_entry(tree: Tree, values: Tree, *index) -> Tree:
    """`tree` with `values` added at leading indices of every array, in the tree's dtypes."""
    return set_entry(tree, jax.tree.map(lambda x, v: x + v.astype(x.dtype), entry(tree, *index), values), *index)
