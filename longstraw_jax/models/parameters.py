"""From a model's abstract tree to arrays on their devices: random, or read from a checkpoint shard by shard."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longstraw_jax.models.base import Model, Parameter, Tree


def is_parameter(x) -> bool:
    return isinstance(x, Parameter)


def map_parameters(f: Callable, tree: Tree, *rest: Tree) -> Tree:
    """`f` on every `Parameter` of an abstract tree (and the matching leaves of `rest`)."""
    return jax.tree.map(f, tree, *rest, is_leaf=is_parameter)


def specs(tree: Tree) -> Tree:
    return map_parameters(lambda p: p.spec, tree)


def shardings(tree: Tree, mesh: Mesh) -> Tree:
    return map_parameters(lambda p: NamedSharding(mesh, p.spec), tree)


def abstract_arrays(tree: Tree, mesh: Mesh) -> Tree:
    """The arrays that a tree of `Parameter` stands for, without their contents: for compiling and for sizing."""
    return map_parameters(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, p.spec)), tree)


def count(tree: Tree) -> int:
    """Number of parameters."""
    return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(tree, is_leaf=is_parameter))


def zeros(shapes: Tree, placements: Tree, mesh: Mesh) -> Tree:
    """Zero arrays, made where they live. `placements` are partition specs."""
    where = jax.tree.map(lambda s: NamedSharding(mesh, s), placements, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=where)()


def initialise(model: Model, mesh: Mesh, seed: int) -> tuple[Tree, Tree]:
    """Random (trainable, frozen), each shard made on its device. The same numbers on every mesh."""
    where = tuple(shardings(tree, mesh) for tree in model.abstract_parameters())
    return jax.jit(model.init_parameters, out_shardings=where)(jax.random.key(seed))


def checkpoint_names(parameter: Parameter, prefix: str = "model.") -> np.ndarray:
    """Checkpoint name of every stacked entry (a 0-d array for a parameter outside the layers)."""
    if parameter.layers is None:
        return np.array(parameter.name if parameter.name.startswith("lm_head.") else prefix + parameter.name)
    return np.vectorize(lambda n: f"{prefix}layers.{n}.{parameter.name}", otypes=[object])(parameter.layers)


def place(parameter: Parameter, mesh: Mesh, read: Callable[[tuple, tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """One parameter, each device's shard read on its own: `read(stack index, slices of the rest)` gives an array."""
    lead = 0 if parameter.layers is None else parameter.layers.ndim

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(*s.indices(size)) for s, size in zip(index[:lead], parameter.shape, strict=False)]
        entries = [np.asarray(read(entry, index[lead:])) for entry in np.stack(np.meshgrid(*ranges, indexing="ij"), -1).reshape(-1, lead)] \
            if lead else [np.asarray(read((), index))]
        return np.stack(entries).astype(parameter.dtype).reshape(*map(len, ranges), *entries[0].shape)

    return jax.make_array_from_callback(parameter.shape, NamedSharding(mesh, parameter.spec), shard)
