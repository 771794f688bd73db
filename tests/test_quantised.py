"""NF4 base weights through the engine: the gradient is plain autodiff's at the weights that the codes stand for."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import engine_case as case
import test_glm52 as glm
from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.loading import load_policy, to_weights
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Model
from longstraw_jax.models.checkpoint import write_json, write_safetensors
from longstraw_jax.models.registry import make_model, named_spec
from longstraw_jax.policy import Policy, random_policy
from longstraw_jax.sharding import make_mesh
from longstraw_jax.state import tree_bytes


def quantised(policy: Policy) -> Policy:
    model = dataclasses.replace(policy.model, weights="nf4")
    return case.perturbed(random_policy(model, policy.mesh), seed=1, spread=0.1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("family", "mesh", "gradient"), [(case, (2, 1), "full"), (glm, (2, 2), "response")], ids=["qwen36", "glm52"])
def test_gradient_is_autodiffs_at_the_quantised_weights(family, mesh, gradient):
    plain = family.policy(mesh)
    p, group = quantised(plain), case.group()
    assert parameters.count(p.model.abstract_parameters()[1]) == parameters.count(plain.model.abstract_parameters()[1])
    ours, theirs = to_weights(p), to_weights(plain)
    changed = {name for name in theirs if np.abs(ours[name] - theirs[name]).max() > 0}
    linear = {name for name in theirs if name.removesuffix(".weight").rpartition(".")[2] in p.model.linear_layers}
    assert changed == linear, "all that an adapter may sit on, and nothing else"

    loss, wanted = case.conventional(p, group, fixed=0 if gradient == "full" else case.PROMPT - 1)
    result = case.ours(p, group, gradient=gradient)
    assert result.loss == pytest.approx(loss, rel=1e-11)
    assert case.farthest(p, result.gradient, wanted) < 1e-9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint in bfloat16, and its policy in plain weights."""
    path = tmp_path_factory.mktemp("checkpoint")
    model = make_model(named_spec("qwen3.6-tiny"), make_mesh(), dtype="bfloat16", lora=None, sizes=case.SIZES)
    policy = random_policy(model, make_mesh())
    write_json(path / "config.json", model.hf_config())
    write_safetensors(path / "model.safetensors", {name: np.asarray(x).astype("bfloat16") for name, x in to_weights(policy).items()})
    return path


def test_loading_quantises_what_was_read(checkpoint):
    """The same numbers on every mesh, those of the whole matrices, in a quarter of the bytes and some for the scales."""
    plain, one, four = (load_policy(checkpoint, make_mesh(n), weights=w) for n, w in ((1, "plain"), (1, "nf4"), (4, "nf4")))
    assert one.model.weights == "nf4" and one.model != plain.model
    whole, ours = to_weights(one), to_weights(four)
    for name, x in whole.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)
    gate = "model.layers.0.mlp.gate_proj.weight"
    error = np.abs(whole[gate].astype(np.float32) - to_weights(plain)[gate].astype(np.float32)).max()
    assert 0 < error < 0.16 * np.abs(whole[gate].astype(np.float32)).max()
    mlp = [tree_bytes(p.frozen["gdn"]["mlp"]["down_proj"]["weight"]) for p in (plain, one)]
    assert mlp[1] / mlp[0] == pytest.approx((0.5 + 2 / 64) / 2)


@pytest.mark.parametrize(("options", "says"), [
    (dict(weights="int8"), "weights are 'int8'; wanted one of plain, nf4"),
    (dict(weights="nf4", trainable="all"), "weights in NF4 cannot be trained"),
])
def test_what_cannot_be_quantised(options, says):
    with pytest.raises(InputError, match=says):
        load_policy("qwen3.6-tiny", make_mesh(), **options)


def test_published_size():
    """The frozen weights of the 27B model: NF4 but for embedding, head and vectors."""
    def frozen(weights: str) -> tuple[Model, int]:
        mesh = AbstractMesh((8, 1), ("context", "expert"))
        model = make_model(
            named_spec("qwen3.6-27b"), mesh, dtype="bfloat16", lora=LoraConfig(16), sizes=BlockSizes(), weights=weights)
        return model, tree_bytes(parameters.abstract_arrays(model.abstract_parameters()[1], mesh))

    (model, nf4), (plain, bf16) = frozen("nf4"), frozen("plain")
    assert parameters.count(model.abstract_parameters()[1]) == parameters.count(plain.abstract_parameters()[1])
    vocabulary = 2 * 2 * 248_320 * 5_120 / 8
    assert nf4 - vocabulary == pytest.approx((bf16 - vocabulary) * (0.5 + 2 / 64) / 2, rel=3e-3)  # norms, taps and the like stay wide
    assert jax.tree.leaves(model.abstract_parameters()[0])  # adapters as before
