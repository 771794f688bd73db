"""The two conventional steps that the engine is held against agree with each other, adapters and all parameters."""

import numpy as np
import pytest

import engine_case as case
from longstraw_jax.config import LoraConfig
from longstraw_jax.conventional.autodiff import autodiff_gradient
from longstraw_jax.conventional.pytorch import pytorch_gradient
from longstraw_jax.evidence import perturbed
from longstraw_jax.loading import load_policy
from longstraw_jax.sharding import make_mesh


@pytest.mark.parametrize(("model", "trainable"), [("qwen3.6-tiny", "lora"), ("glm5.2-tiny", "lora"), ("glm5.2-tiny", "all")])
def test_autodiff_is_pytorch(model, trainable):
    """On random weights that are large enough for every choice and every path to matter."""
    lora = LoraConfig(rank=3, alpha=5) if trainable == "lora" else None
    policy = perturbed(load_policy(model, make_mesh(), lora=lora, trainable=trainable), seed=1, spread=0.05)
    group = case.group((9, 20), prompt=50)
    ours, theirs = autodiff_gradient(policy, group)[1], pytorch_gradient(policy, group)
    assert ours.keys() == theirs.keys()
    moved = [name for name in theirs if np.linalg.norm(theirs[name]) > 0]
    assert len(moved) > 0.75 * len(theirs)  # not every expert is chosen by a token that is trained
    assert max((case.relative(ours[name], theirs[name]), name) for name in moved)[0] < 1e-3
    assert not any(ours[name].any() for name in theirs.keys() - set(moved))
