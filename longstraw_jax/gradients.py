"""The gradient accumulator: one tree for a whole step, shaped and placed as the trainable parameters, in the statistics dtype.

Inside a program every owner adds its own part. What the owners share out is complete that way; of what they all hold a copy,
the parts are summed over the owners once, at the program's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from longstraw_jax.models import parameters
from longstraw_jax.models.base import Model, Tree
from longstraw_jax.policy import Policy


def zero_gradient(policy: Policy) -> Tree:
    """A fresh accumulator."""
    abstract = policy.model.abstract_parameters()[0]
    return parameters.zeros(parameters.abstract_arrays(abstract, policy.mesh), parameters.specs(abstract), policy.mesh)


def grown(model: Model, gradient: Tree, grow: Callable[[Tree], tuple[Tree, Any]]) -> tuple[Tree, Any]:
    """`grow(gradient)`, the owners' parts summed. Inside a program; `grow` returns (gradient, anything)."""
    specs = parameters.specs(model.abstract_parameters()[0])
    replicated = jax.tree.map(lambda s: len(s) == 0, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    first = model.owners.index() == 0  # what came in must count once
    gradient, rest = grow(jax.tree.map(lambda g, r: jnp.where(first, g, 0) if r else g, gradient, replicated))
    return jax.tree.map(lambda g, r: model.owners.sum(g) if r else g, gradient, replicated), rest


@jax.jit
def cosine(a: Tree, b: Tree) -> jax.Array:
    """Of two gradients as one vector each; NaN where one is 0."""
    def dot(x, y):
        return sum(jnp.vdot(p, q) for p, q in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))

    return dot(a, b) / jnp.sqrt(dot(a, a) * dot(b, b))
