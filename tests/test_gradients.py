"""The owners' parts of a gradient, summed over those that hold copies and no others."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import engine_case as case
from longstraw_jax.gradients import grown
from longstraw_jax.models.base import Parameter
from longstraw_jax.models.qwen36.model import Qwen36Model
from longstraw_jax.sharding import Owners

SPECS = {
    "everyone": PartitionSpec(),
    "experts": PartitionSpec(None, "expert"),
    "context": PartitionSpec("context"),
    "split": PartitionSpec(None, ("context", "expert")),
    "split twice": PartitionSpec("context", "expert"),
}


@dataclass(frozen=True)
class Placed(Qwen36Model):
    """A model whose parameters are placed in every way there is."""

    def abstract_parameters(self):
        return {n: Parameter((4, 24), np.dtype("float32"), spec, None, n, np.zeros) for n, spec in SPECS.items()}, {}


@pytest.mark.parametrize("degrees", [(1, 1), (2, 4), (4, 1)], ids=lambda degrees: "x".join(map(str, degrees)))
def test_parts_are_summed_over_the_axes_that_a_placement_does_not_name(degrees, mesh, per_owner):
    devices = mesh(*degrees)
    owners, (context, expert) = Owners.of(devices), degrees
    model = Placed(case.SPEC, owners, "float32", None, case.SIZES)

    def run(gradient):
        part = 1.0 + owners.index()
        return grown(model, gradient, lambda g: (jax.tree.map(lambda x: x + part, g), part))[0]

    before = {name: np.random.default_rng(0).normal(size=(4, 24)).astype(np.float32) for name in SPECS}
    after = per_owner(run, devices, (SPECS,), SPECS)(jax.tree.map(jnp.asarray, before))
    part = 1.0 + np.arange(context * expert).reshape(context, expert)
    wanted = {
        "everyone": np.full((4, 24), part.sum()),
        "experts": np.broadcast_to(np.repeat(part.sum(0), 24 // expert), (4, 24)),
        "context": np.broadcast_to(np.repeat(part.sum(1), 4 // context)[:, None], (4, 24)),
        "split": np.broadcast_to(np.repeat(part.reshape(-1), 24 // part.size), (4, 24)),
        "split twice": np.repeat(np.repeat(part, 4 // context, 0), 24 // expert, 1),
    }
    for name, x in after.items():
        np.testing.assert_allclose(x - before[name], wanted[name], rtol=1e-5, err_msg=name)
        for shard in x.addressable_shards:  # copies are equal to the bit
            np.testing.assert_array_equal(shard.data, np.asarray(x)[shard.index])
