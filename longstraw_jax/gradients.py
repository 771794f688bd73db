"""The gradient accumulator: one tree for a whole step, shaped and placed as the trainable parameters, in the statistics dtype.

Inside a program every owner adds its own part. What all owners share out is complete that way; of what some of them hold copies
(all of them: an ordinary adapter; those along the `context` axis: an expert's), the parts are summed over the holders once, at
the program's end.
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
from longstraw_jax.sharding import Owners


def zero_gradient(policy: Policy) -> Tree:
    """A fresh accumulator."""
    abstract = policy.model.abstract_parameters()[0]
    return parameters.zeros(parameters.abstract_arrays(abstract, policy.mesh))


def grown(model: Model, gradient: Tree, grow: Callable[[Tree], tuple[Tree, Any]]) -> tuple[Tree, Any]:
    """`grow(gradient)`, the owners' parts summed. Inside a program; `grow` returns (gradient, anything).

    A gradient is summed over just the mesh axes that its parameter's placement does not name.
    """
    specs = parameters.specs(model.abstract_parameters()[0])
    copies = jax.tree.map(model.owners.copies, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    gradient, rest = grow(jax.tree.map(_of_first, gradient, copies))
    return jax.tree.map(lambda g, c: c.sum(g), gradient, copies), rest


def _of_first(gradient: jax.Array, copies: Owners) -> jax.Array:
    """What came in must count once: the first holder keeps it, the others start from 0."""
    return jnp.where(copies.index() == 0, gradient, 0) if copies.count > 1 else gradient


@jax.jit
def cosine(a: Tree, b: Tree) -> jax.Array:
    """Of two gradients as one vector each; NaN where one is 0."""
    def dot(x, y):
        return sum(jnp.vdot(p, q) for p, q in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))

    return dot(a, b) / jnp.sqrt(dot(a, a) * dot(b, b))
