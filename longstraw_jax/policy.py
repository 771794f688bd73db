"""The policy: a model on a mesh with its parameters, and the version that ties captured states to them."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh

from longstraw_jax.errors import UnsupportedError
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Model, Tree


@dataclass(frozen=True)
class Policy:
    """Trainable and frozen parameters of one model on one mesh. Immutable: an update gives a new policy."""

    model: Model
    mesh: Mesh
    trainable: Tree
    """What the optimizer moves: adapters, or all parameters. Statistics dtype."""
    frozen: Tree
    """The base weights, shared out over all devices; empty where everything is trained."""
    origin: str = field(default_factory=lambda: Policy.new_origin())
    step: int = 0
    """Updates since the origin."""

    @staticmethod
    def new_origin() -> str:
        return uuid.uuid4().hex

    @property
    def version(self) -> str:
        """Names the parameters; equal versions hold equal numbers."""
        return f"{self.origin}:{self.step}"

    def stepped(self, trainable: Tree) -> Policy:
        """The policy after an update."""
        return dataclasses.replace(self, trainable=trainable, step=self.step + 1)

    def reference(self) -> Policy:
        """The policy with its adapters off: B = 0, so that every program runs unchanged. Its own origin."""
        if self.model.lora is None:
            raise UnsupportedError("all parameters are trained, so no adapter can be switched off for the reference; keep the "
                                   "initial policy and score with it")
        off = jax.tree_util.tree_map_with_path(
            lambda path, x: jax.numpy.zeros_like(x) if path[-1].key == "lora_B" else x, self.trainable)
        return dataclasses.replace(self, trainable=off, origin=self.new_origin(), step=0)

    def trainable_count(self) -> int:
        return parameters.count(self.model.abstract_parameters()[0])


def random_policy(model: Model, mesh: Mesh, seed: int = 0) -> Policy:
    """A policy with random weights and fresh adapters (B = 0)."""
    return Policy(model, mesh, *parameters.initialise(model, mesh, seed))
