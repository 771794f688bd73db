"""GLM-5.2 from a Hugging Face directory: experts' tensors into their stacks, what is left out, adapters there and back."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longstraw_jax.config import LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.evidence import perturbed
from longstraw_jax.loading import load_policy, save_adapter, to_weights
from longstraw_jax.models import parameters
from longstraw_jax.models.adapters import read_adapter
from torch_reference import build_tiny_glm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory as transformers saves it, with a tensor of the layer that predicts a further token."""
    directory = tmp_path_factory.mktemp("glm")
    model = build_tiny_glm(directory)
    tensors = load_file(directory / "model.safetensors")
    further = f"model.layers.{model.config.num_hidden_layers}.eh_proj.weight"
    save_file({**tensors, further: np.zeros((2, 3), np.float32)}, directory / "model.safetensors")
    return directory, tensors


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
def test_every_tensor_finds_its_place(checkpoint, mesh, shape):
    directory, tensors = checkpoint
    notes = []
    weights = to_weights(load_policy(directory, mesh(*shape), trainable="all", note=notes.append))
    assert weights.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(weights[name], x, err_msg=name)
    assert "1 tensors are no part of the text model" in notes[0]


def test_a_missing_expert_is_named(checkpoint, mesh, tmp_path):
    directory, tensors = checkpoint
    name = next(name for name in tensors if ".experts.3.up_proj" in name)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file({n: x for n, x in tensors.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=rf"1 missing \({name}\)"):
        load_policy(tmp_path, mesh())


def test_adapters_there_and_back(checkpoint, mesh, tmp_path):
    directory, _ = checkpoint
    policy = perturbed(load_policy(directory, mesh(1, 2), lora=LoraConfig(rank=2, targets=("q_b_proj", "kv_b_proj", "down_proj"))), seed=3)
    save_adapter(policy, tmp_path)
    modules = read_adapter(tmp_path).matrices
    assert {"layers.0.mlp.down_proj", "layers.5.mlp.experts.3.down_proj", "layers.5.mlp.shared_experts.down_proj"} <= modules.keys()
    again = load_policy(directory, mesh(2, 1), adapter=tmp_path)
    names = (parameters.to_host(p.trainable, p.model.abstract_parameters()[0]) for p in (policy, again))
    before, after = names
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
