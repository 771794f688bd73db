"""`longstraw step` on a user's checkpoint and adapter, against PyTorch and PEFT doing the same step."""

import json

import jax
import numpy as np
import peft
import pytest
import torch
from jax.sharding import AbstractMesh
from safetensors.numpy import load_file, save_file

from longstraw_jax.capture import capture
from longstraw_jax.cli import main
from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.conventional.pytorch import response_step
from longstraw_jax.groups import read_groups
from longstraw_jax.loading import load_policy
from longstraw_jax.models import parameters
from longstraw_jax.models.adapters import read_adapter
from longstraw_jax.models.registry import make_model, named_spec, spec_of_config
from longstraw_jax.score import score
from longstraw_jax.sharding import make_mesh
from torch_reference import build_tiny_qwen, load_torch

# other shapes than every other checkpoint here: three GDN layers to one, vocabulary that two devices do not divide
SHAPES = dict(vocab_size=101, hidden_size=56, intermediate_size=72, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=1, head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12,
              linear_value_head_dim=20, rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
                                                         "mrope_section": [2, 2, 2], "mrope_interleaved": True})
TARGETS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
           "gate_proj", "up_proj", "down_proj"]
BLOCKS = ["--page", "4", "--chunk", "32", "--block", "32", "--queries", "4", "--keys", "16", "--recurrence", "16"]


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A checkpoint, a PEFT adapter with B far from 0, and two groups of ragged responses, one with a mask."""
    place = tmp_path_factory.mktemp("step")
    build_tiny_qwen(place / "model", **SHAPES)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(load_torch(place / "model"), peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS))
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2)
    wrapped.save_pretrained(place / "adapter")
    rng = np.random.default_rng(0)

    def record(prompt, lengths, masked):
        return {"prompt_ids": rng.integers(0, 101, prompt).tolist(), "responses": [
            {"ids": rng.integers(0, 101, n).tolist(), "reward": float(i),
             **({"mask": [1, 0, *[1] * (n - 2)]} if masked else {})} for i, n in enumerate(lengths)]}

    records = [record(45, (20, 7, 13), masked=True), record(30, (9, 11), masked=False)]
    (place / "groups.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return place


def torch_step(place, adapter, kind="response"):
    """(log-probabilities per group, gradient by PEFT name) of the mean of the groups' losses."""
    model = peft.PeftModel.from_pretrained(load_torch(place / "model"), place / adapter, is_trainable=True)
    groups = read_groups(place / "groups.jsonl")
    scored = []
    for group in groups:
        _, logprobs = response_step(model, group.prompt_ids, [r.ids for r in group.responses], list(group.advantages),
                                    [r.mask for r in group.responses], detach_prompt=kind == "response")
        scored.append(logprobs)
    gradient = {name.replace(".default", ""): p.grad.numpy() / len(groups) for name, p in model.named_parameters() if p.grad is not None}
    return scored, gradient


# with the kernels (interpreted) everything runs: capture, replay and sweep
@pytest.mark.parametrize(("mesh", "kind", "implementation"), [("context=1", "response", "auto"), ("context=2", "full", "pallas")])
def test_one_sgd_step_is_pytorchs(workplace, tmp_path, mesh, kind, implementation):
    out = tmp_path / "out"
    code = run("step", "--model", workplace / "model", "--groups", workplace / "groups.jsonl", "--out", out, "--adapter",
               workplace / "adapter", "--optimizer", "sgd", "--learning-rate", 0.5, "--mesh", mesh, "--gradient", kind,
               "--implementation", implementation, *BLOCKS)
    assert code == 0
    _, gradient = torch_step(workplace, "adapter", kind)
    before, after = read_adapter(workplace / "adapter"), read_adapter(out)
    assert before.matrices.keys() == after.matrices.keys()
    errors = {}
    for module in before.matrices:
        for side, old, new in zip("AB", before.matrices[module], after.matrices[module], strict=True):
            wanted = -0.5 * gradient[before.key(module, side)]
            errors[module, side] = np.linalg.norm(new - old - wanted) / np.linalg.norm(wanted)
    print("largest relative difference of a matrix's change", max(errors.values()))
    assert len(errors) == 2 * (3 * 8 + 7)
    assert max(errors.values()) < 1e-3
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["updated"] is True
    assert receipt["positions"] == 65
    assert receipt["mesh"] == {"context": int(mesh[-1]), "expert": 1}
    assert receipt["gradient"] == kind
    assert set(receipt["stages"]) == {"capture", "replay", "update"} | ({"sweep"} if kind == "full" else set())
    if kind == "response":
        assert_the_same_to_peft(workplace, out)


def assert_the_same_to_peft(workplace, out):
    """A further step from the adapter that was written starts at the same log-probabilities."""
    scored, _ = torch_step(workplace, out)
    policy = load_policy(workplace / "model", make_mesh(2), adapter=out, sizes=BlockSizes(4, 32, 32, 4, 16, 128, 16))
    group = read_groups(workplace / "groups.jsonl")[0]
    for mine, theirs in zip(score(policy, capture(policy, group.prompt_ids, capacity=44), group.responses), scored[0], strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=0, atol=2e-4)


def break_index(place, model):
    tensors = load_file(place / "model" / "model.safetensors")
    save_file(tensors, model / "part-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part-2.safetensors")}))


def change_config(place, model):
    config = json.loads((place / "model" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    (model / "model.safetensors").symlink_to(place / "model" / "model.safetensors")


GOOD = {"prompt_ids": [1, 2, 3], "responses": [{"ids": [4, 5], "reward": 1.0}, {"ids": [6], "reward": 0.0}]}


@pytest.mark.parametrize(("change", "says"), [
    ({"responses": [{"ids": [], "reward": 1.0}]}, "empty response"),
    ({"responses": [{"ids": [4, 101], "reward": 1.0}]}, "is 101; wanted 0 to 100"),
    ({"prompt_ids": []}, "has 0 token"),
    ({"prompt_ids": [1]}, "has 1 token"),
    ({"responses": [{"ids": [4], "reward": float("nan")}]}, "reward is nan"),
    ({"responses": [{"ids": [4, 5], "reward": 1.0, "mask": [1]}]}, "mask has length 1"),
    ({"responses": [{"ids": [4, 5], "rewrad": 1.0}]}, "rewrad"),
    ({"prompt_ids": [1] * 5000}, "wanted at most 4096"),
])
def test_bad_groups_get_one_line(workplace, tmp_path, capsys, change, says):
    (tmp_path / "groups.jsonl").write_text(json.dumps({**GOOD, **change}))
    code = run("step", "--model", workplace / "model", "--groups", tmp_path / "groups.jsonl", "--out", tmp_path / "out")
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("breaking", "says"), [(break_index, "part-2.safetensors"), (change_config, "of another shape")])
def test_bad_checkpoints_get_one_line(workplace, tmp_path, capsys, breaking, says):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((workplace / "model" / "config.json").read_text())
    breaking(workplace, model)
    code = run("step", "--model", model, "--groups", workplace / "groups.jsonl", "--out", tmp_path / "out")
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "says"), [
    (["--mesh", "context=3"], "use a mesh of 1, 2, 4 devices"),
    (["--mesh", "context=16"], "needs 16 devices"),
    (["--mesh", "sideways=2"], "no AXIS=N"),
    (["--targets", "lm_head"], "no linear layer of the blocks"),
    (["--temperature", "0"], "temperature is 0"),
    (["--rank", "0"], "rank is 0"),
    (["--learning-rate", "nan"], "learning rate is nan"),
    (["--steps", "0"], "wanted at least 1"),
    (["--old-logprobs", "groups"], "has no logprobs"),
    (["--adapter", "nowhere"], "nowhere does not exist"),
    (["--frobnicate", "1"], "--frobnicate"),
])
def test_bad_options_get_one_line(workplace, tmp_path, capsys, arguments, says):
    code = run("step", "--model", workplace / "model", "--groups", workplace / "groups.jsonl", "--out", tmp_path / "out", *arguments)
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_published_sizes_without_the_weights():
    """The 27B by its config: 116,727,808 adapter parameters at rank 16 on every linear layer (LongStraw's 116.7M)."""
    mesh = AbstractMesh((8, 1), ("context", "expert"))
    model = make_model(named_spec("qwen3.6-27b"), mesh, dtype="bfloat16", lora=LoraConfig(16), sizes=BlockSizes())
    trainable, frozen = model.abstract_parameters()
    assert parameters.count(trainable) == 116_727_808
    assert parameters.count(frozen) == 26_895_998_464
    rows = model.abstract_rows(8, 64)
    assert sum(np.prod(x.shape) * 2 for x in rows.values()) == 65_536 * 8 * 64
    assert spec_of_config({"model_type": "qwen3_5_text", **vars(model.spec)}) == model.spec
    assert jax.tree.leaves(model.abstract_recurrent()[0])[0].dtype == np.float32
