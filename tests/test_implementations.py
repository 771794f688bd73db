"""A captured prompt with the kernels, interpreted, is the one captured with XLA; and one process can do both."""

import jax
import numpy as np

from longstraw_jax.capture import capture, capture_program
from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.evidence import random_group
from longstraw_jax.kernels_pallas import implementation
from longstraw_jax.models.registry import make_model, named_spec
from longstraw_jax.policy import random_policy
from longstraw_jax.sharding import make_mesh

SIZES = BlockSizes(page=8, chunk=64, block=16, queries=8, keys=32, logits=16, recurrence=8)


def test_the_captured_state_is_the_same():
    mesh, spec = make_mesh(2), named_spec("glm5.2-tiny")  # of the tiny models the one that calls every operator
    policy = random_policy(make_model(spec, mesh, dtype="float32", lora=LoraConfig(2, 4), sizes=SIZES), mesh)
    prompt = random_group(spec.vocab_size, 100, 4, 2, seed=3).prompt_ids
    with implementation("pallas"):
        kernels = capture(policy, prompt).rows
    xla = capture(policy, prompt).rows
    assert len(capture_program(policy.model, policy.mesh).executables) == 2, "the second capture did not run the first's program"
    for x, wanted in zip(jax.tree.leaves(kernels), jax.tree.leaves(xla), strict=True):
        assert np.abs(wanted).max() > 0
        np.testing.assert_allclose(x, wanted, rtol=1e-3, atol=1e-4)
