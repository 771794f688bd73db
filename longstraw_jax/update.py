"""Update: one optimizer call per group step, on replicas that stay bitwise equal."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from longstraw_jax.config import OptimizerConfig
from longstraw_jax.errors import LongstrawError
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Tree
from longstraw_jax.policy import Policy


@dataclass(frozen=True)
class Update:
    """A policy one step on, its optimizer state, and the norm of the gradient that moved it (before clipping)."""

    policy: Policy
    optimizer_state: Tree
    grad_norm: float


@functools.cache
def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    steps = [optax.clip_by_global_norm(config.max_grad_norm)] if config.max_grad_norm else []
    if config.name == "adamw":
        steps.append(optax.adamw(config.learning_rate, weight_decay=config.weight_decay))
    else:
        steps += [optax.add_decayed_weights(config.weight_decay)] if config.weight_decay else []
        steps.append(optax.sgd(config.learning_rate))
    return optax.chain(*steps)


def init_optimizer(policy: Policy, config: OptimizerConfig) -> Tree:
    """A fresh optimizer state, its moments placed as the parameters they belong to."""
    shapes = abstract_optimizer_state(config, parameters.abstract_arrays(policy.model.abstract_parameters()[0], policy.mesh))
    return jax.jit(make_optimizer(config).init, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))(policy.trainable)


def abstract_optimizer_state(config: OptimizerConfig, trainable: Tree) -> Tree:
    """The optimizer's state for `trainable`, shapes with placements, in the same form."""
    optimizer, placed = make_optimizer(config), jax.tree.leaves(trainable)[0].sharding
    replicated = NamedSharding(placed.mesh, PartitionSpec(), memory_kind="device")

    def sized(shape, sharding):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return optax.tree_utils.tree_map_params(
        optimizer, lambda shape, parameter: sized(shape, parameter.sharding), jax.eval_shape(optimizer.init, trainable), trainable,
        transform_non_params=lambda shape: sized(shape, replicated))


@functools.cache
def update_program(config: OptimizerConfig):
    """(trainable, optimizer state, gradient) -> (trainable, optimizer state); the last two are donated."""

    def apply(trainable, state, gradient):
        change, state = make_optimizer(config).update(gradient, state, trainable)
        return optax.apply_updates(trainable, change), state

    return jax.jit(apply, donate_argnums=(1, 2))


_global_norm = jax.jit(optax.tree.norm)


def update(policy: Policy, optimizer_state: Tree, gradient: Tree, config: OptimizerConfig) -> Update:
    """Applies one optimizer step. `optimizer_state` and `gradient` are used up.

    A gradient of exactly 0 everywhere (every token masked, no spread in the rewards) changes nothing, moments included.
    Raises LongstrawError for a gradient that is not finite; the policy is then as it was.
    """
    norm = float(_global_norm(gradient))
    if not np.isfinite(norm):
        raise LongstrawError(f"the gradient's norm is {norm}: nothing was updated; look at the log-probabilities and the rewards")
    if norm == 0:
        return Update(policy, optimizer_state, norm)
    trainable, optimizer_state = update_program(config)(policy.trainable, optimizer_state, gradient)
    return Update(policy.stepped(trainable), optimizer_state, norm)


def replicas_equal(tree: Tree) -> bool:
    """Whether every device holds bitwise the same numbers wherever it should."""

    def one(x: jax.Array) -> bool:
        first: dict[tuple, bytes] = {}
        for shard in x.addressable_shards:
            key = tuple((s.start, s.stop) for s in shard.index)
            if first.setdefault(key, np.asarray(shard.data).tobytes()) != np.asarray(shard.data).tobytes():
                return False
        return True

    return all(one(x) for x in jax.tree.leaves(tree))
