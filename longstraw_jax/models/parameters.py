"""From a model's abstract tree to arrays on their devices: random, or read from a checkpoint shard by shard."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from longstraw_jax.errors import InputError
from longstraw_jax.models.base import Model, Parameter, Tree
from longstraw_jax.models.layers.nf4 import BLOCK, blocks_of, dequantise, quantise, quantise_scales
from longstraw_jax.sharding import AnyMesh


def is_parameter(x) -> bool:
    return isinstance(x, Parameter)


def map_parameters(f: Callable, tree: Tree, *rest: Tree) -> Tree:
    """`f` on every `Parameter` of an abstract tree (and the matching leaves of `rest`)."""
    return jax.tree.map(f, tree, *rest, is_leaf=is_parameter)


def specs(tree: Tree) -> Tree:
    return map_parameters(lambda p: p.spec, tree)


def shardings(tree: Tree, mesh: Mesh) -> Tree:
    return map_parameters(lambda p: NamedSharding(mesh, p.spec), tree)


def abstract_arrays(tree: Tree, mesh: AnyMesh) -> Tree:
    """The arrays that a tree of `Parameter` stands for, without their contents: for compiling and for sizing."""
    def one(p: Parameter) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, p.spec, memory_kind="device"))

    return map_parameters(one, tree)


def count(tree: Tree) -> int:
    """Number of parameters; of a quantised matrix, its weights."""
    def one(p: Parameter) -> int:
        if p.packed and p.packed.part == "scales":
            return 0
        return math.prod(() if p.stack is None else p.stack.shape) * math.prod(p.entry_shape)

    return sum(map(one, jax.tree.leaves(tree, is_leaf=is_parameter)))


def zeros(shapes: Tree) -> Tree:
    """Zero arrays, made where they live: by the shardings of `shapes`."""
    leaves, tree = jax.tree.flatten(shapes)
    return _zeros_program(tuple((s.shape, s.dtype) for s in leaves), tree, tuple(s.sharding for s in leaves))()


@functools.cache
def _zeros_program(shapes: tuple, tree: Any, where: tuple) -> Callable[[], Tree]:
    def make():
        return jax.tree.unflatten(tree, [jnp.zeros(*s) for s in shapes])

    return jax.jit(make, out_shardings=jax.tree.unflatten(tree, where))


def first_value(parameter: Parameter, mesh: Mesh, seed: int) -> jax.Array:
    """A parameter's first value, shard by shard. The same numbers on every mesh."""
    names = checkpoint_names(parameter)

    @functools.cache
    def entry(stack: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng((seed, zlib.crc32(names[stack].encode())))
        return parameter.init(rng, parameter.entry_shape)

    return place(parameter, mesh, lambda stack, index: entry(stack)[index])


def initialise(model: Model, mesh: Mesh, seed: int) -> tuple[Tree, Tree]:
    """First values of (trainable, frozen)."""
    return tuple(map_parameters(lambda p: first_value(p, mesh, seed), tree) for tree in model.abstract_parameters())


def checkpoint_names(parameter: Parameter, prefix: str = "model.") -> np.ndarray:
    """Checkpoint name of every stacked entry (a 0-d array where nothing is stacked)."""
    if parameter.stack is None:
        return np.array(parameter.name if parameter.name.startswith("lm_head.") else prefix + parameter.name, object)
    return np.vectorize(lambda entry: prefix + entry + parameter.name, otypes=[object])(parameter.stack)


def place(parameter: Parameter, mesh: Mesh, read: Callable[[tuple, tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """One parameter, each device's shard read on its own: `read(stack index, slices of the entry)` gives an array.

    Shards of a quantised matrix are quantised as they are read. Raises InputError where that cannot be, naming the matrix.
    """
    lead = 0 if parameter.stack is None else parameter.stack.ndim
    names = checkpoint_names(parameter)

    def stored(entry: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        packed = parameter.packed
        if packed is None:
            return np.asarray(read(entry, index), parameter.dtype)
        *rows, blocks = index[:-1] if packed.part == "codes" else index
        start, stop, _ = blocks.indices(blocks_of(packed.features))
        weight = read(entry, (*rows, slice(start * BLOCK, min(stop * BLOCK, packed.features))))
        try:
            return quantise(weight)[0] if packed.part == "codes" else quantise_scales(weight)
        except InputError as error:
            raise InputError(f"tensor {names[entry]}: {error}") from None

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(*s.indices(size)) for s, size in zip(index[:lead], parameter.shape, strict=False)]
        entries = [stored(entry, index[lead:]) for entry in itertools.product(*ranges)]
        return np.stack(entries).reshape(*map(len, ranges), *entries[0].shape)

    return jax.make_array_from_callback(parameter.shape, NamedSharding(mesh, parameter.spec), shard)


def to_host(tree: Tree, abstract: Tree) -> dict[str, np.ndarray]:
    """A tree as {checkpoint name: whole array}, quantised matrices as what they stand for. For small models and adapters.

    Adapters' names end in `.lora_A` and `.lora_B`.
    """
    named, codes = {}, None
    for parameter, array in zip(jax.tree.leaves(abstract, is_leaf=is_parameter), jax.tree.leaves(tree), strict=True):
        names, whole, packed = checkpoint_names(parameter), np.asarray(array), parameter.packed
        if packed and packed.part == "codes":  # the scales come next
            codes = whole
            continue
        if packed:
            whole = np.asarray(dequantise(jnp.asarray(codes), jnp.asarray(whole), packed.features, packed.dtype))
        named |= {names[stack]: whole[stack] for stack in np.ndindex(names.shape)}
    return named
