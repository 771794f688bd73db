"""PEFT adapters: a round trip, what is refused, and the verdict of PEFT itself on a small model."""

import json
import warnings

import ml_dtypes
import numpy as np
import pytest

from longstraw_jax.config import LoraConfig
from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.models.adapters import (
    COMPOSITE_PREFIX,
    TEXT_PREFIX,
    PeftAdapter,
    read_adapter,
    target_names,
    write_adapter,
)
from longstraw_jax.models.checkpoint import write_json, write_safetensors

RANK = 3
OPTIONS = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": "all-linear"}


def _pair(inputs=8, outputs=5, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(RANK, inputs)).astype(dtype), rng.normal(size=(outputs, RANK)).astype(dtype)


def _adapter(**changes):
    matrices = {"layers.0.linear_attn.in_proj_z": _pair(seed=1), "layers.3.self_attn.q_proj": _pair(outputs=16, seed=2)}
    fields = {"config": LoraConfig(RANK, 6.0, ("in_proj_z", "q_proj")), "matrices": matrices, "base_model": "some/model"}
    return PeftAdapter(**fields | changes)


def _keys(adapter):
    return {adapter.key(module, side): matrix for module, pair in adapter.matrices.items()
            for side, matrix in zip("AB", pair, strict=True)}


def _write(directory, tensors=None, **options):
    write_json(directory / "adapter_config.json", OPTIONS | options)
    write_safetensors(directory / "adapter_model.safetensors", _keys(_adapter()) if tensors is None else tensors)
    return directory


def _assert_same(left, right):
    assert (left.config, left.prefix, left.base_model) == (right.config, right.prefix, right.base_model)
    assert left.matrices.keys() == right.matrices.keys()
    for module, pair in left.matrices.items():
        for x, y in zip(pair, right.matrices[module], strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("prefix", [TEXT_PREFIX, COMPOSITE_PREFIX])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_round_trip(tmp_path, prefix, dtype):
    adapter = _adapter(matrices={"layers.0.self_attn.q_proj": _pair(dtype=dtype)}, prefix=prefix, base_model=None,
                       config=LoraConfig(RANK, 2.5, ("q_proj",), rank_stabilized=True))
    write_adapter(tmp_path / "new" / "adapter", adapter)
    _assert_same(read_adapter(tmp_path / "new" / "adapter"), adapter)


def test_transposed_matrices_are_written_by_value(tmp_path):
    a, b = _pair()
    transposed = {"layers.0.x.q_proj": (np.asfortranarray(a), b.T.copy().T)}
    write_adapter(tmp_path, _adapter(matrices=transposed, config=LoraConfig(RANK, 6.0)))
    read = read_adapter(tmp_path).matrices["layers.0.x.q_proj"]
    np.testing.assert_array_equal(read[0], a)
    np.testing.assert_array_equal(read[1], b)


def test_writing_replaces_the_adapter_and_nothing_else(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    write_adapter(tmp_path, _adapter())
    write_adapter(tmp_path, _adapter(config=LoraConfig(RANK, 7.0)))
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "README.md").read_text() == "mine"
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["in_proj_z", "q_proj"]
    assert read_adapter(tmp_path).config == LoraConfig(RANK, 7.0, ("in_proj_z", "q_proj"))


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear", r".*layers\.\d+\.(q|k)_proj", None])
def test_the_keys_decide_the_targets(tmp_path, targets):
    adapter = read_adapter(_write(tmp_path, target_modules=targets, base_model_name_or_path="some/model"))
    _assert_same(adapter, _adapter())
    assert adapter.config.targets == target_names(adapter.matrices)


def test_the_adapter_name_in_the_keys_is_read_over(tmp_path):
    named = {key.replace(".weight", ".default.weight"): value for key, value in _keys(_adapter()).items()}
    _assert_same(read_adapter(_write(tmp_path, named)), _adapter(base_model=None))
    with pytest.raises(InputError, match="holds both"):
        read_adapter(_write(tmp_path, named | _keys(_adapter())))


def test_options_that_only_concern_training_are_read_over(tmp_path):
    read = read_adapter(_write(tmp_path, lora_dropout=0.1, use_rslora=True, init_lora_weights="gaussian", use_dora=False,
                               rank_pattern={}, layer_replication=None, qalora_group_size=16, task_type="CAUSAL_LM"))
    assert read.config.rank_stabilized
    assert read.config.scale == pytest.approx(6 / 3**0.5)


@pytest.mark.parametrize(("name", "value"), [
    ("use_dora", True), ("rank_pattern", {"q_proj": 4}), ("alpha_pattern", {"q_proj": 4}), ("bias", "lora_only"),
    ("bias", None), ("modules_to_save", ["lm_head"]), ("fan_in_fan_out", True), ("peft_type", "LOHA"),
    ("layers_to_transform", [0]), ("layers_to_transform", 0), ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", 1), ("lora_bias", True),
    ("target_parameters", ["experts.w"]), ("trainable_token_indices", [1]), ("layer_replication", [[0, 2]]),
    ("an_option_of_tomorrow", True),
])
def test_unsupported_options_are_named(tmp_path, name, value):
    with pytest.raises(UnsupportedError, match=f": {name} is ") as error:
        read_adapter(_write(tmp_path, **{name: value}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), [
    ("r", None), ("r", "16"), ("r", True), ("r", 0), ("lora_alpha", None), ("lora_alpha", -1), ("use_rslora", 1),
    ("base_model_name_or_path", 3),
])
def test_senseless_options_are_refused(tmp_path, name, value):
    with pytest.raises(InputError, match=name.removeprefix("lora_")):
        read_adapter(_write(tmp_path, **{name: value}))


@pytest.mark.parametrize("key", [
    "base_model.model.lm_head.lora_A.weight", "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector",
    "base_model.model.model.layers.0.mlp.up_proj.lora_B.bias",
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.other.weight", "base_model.model.model.norm.weight",
    "model.layers.0.mlp.up_proj.lora_A.weight",
])
def test_other_keys_are_refused_by_name(tmp_path, key):
    with pytest.raises(UnsupportedError, match=key):
        read_adapter(_write(tmp_path, _keys(_adapter()) | {key: np.ones((RANK, 4), np.float32)}))


def test_incomplete_and_mixed_files_are_refused(tmp_path):
    keys = _keys(_adapter())
    lost = TEXT_PREFIX + "layers.3.self_attn.q_proj.lora_A.weight"
    with pytest.raises(InputError, match="q_proj.lora_B.weight without its lora_A"):
        read_adapter(_write(tmp_path, {key: value for key, value in keys.items() if key != lost}))
    other = _adapter(prefix=COMPOSITE_PREFIX, matrices={"layers.1.mlp.up_proj": _pair()}, config=LoraConfig(RANK))
    with pytest.raises(InputError, match="keys of 2 model classes"):
        read_adapter(_write(tmp_path, keys | _keys(other)))
    with pytest.raises(InputError, match="no matrices"):
        read_adapter(_write(tmp_path, {}))


@pytest.mark.parametrize(("side", "value", "match"), [
    ("A", np.ones((4, 8), np.float32), r"is \[4, 8\]; wanted \[3, in\]"),
    ("B", np.ones((5, 4), np.float32), r"is \[5, 4\]; wanted \[out, 3\]"),
    ("B", np.ones((5, RANK, 1), np.float32), r"wanted \[out, 3\]"),
    ("A", np.ones((RANK, 8), np.int8), "is int8"),
    ("A", np.full((RANK, 8), np.nan, ml_dtypes.bfloat16), "not finite"),
    ("B", np.full((5, RANK), np.inf, np.float32), "not finite"),
])
def test_unfit_matrices_are_named(tmp_path, side, value, match):
    key = TEXT_PREFIX + f"layers.3.self_attn.q_proj.lora_{side}.weight"
    with pytest.raises(InputError, match=f"adapter_model.safetensors: {key}.*{match}"):
        read_adapter(_write(tmp_path, _keys(_adapter()) | {key: value}))


@pytest.mark.parametrize("changes", [
    {"matrices": {}}, {"prefix": "model."}, {"config": LoraConfig(RANK + 1)},
    {"config": LoraConfig(RANK, targets=("k_proj",))}, {"matrices": {"model.layers.0.mlp.up_proj": _pair()}},
])
def test_an_adapter_that_contradicts_itself_cannot_be_made(changes):
    with pytest.raises(InputError):
        _adapter(**changes)


def test_directories_that_are_no_adapter_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
    write_json(tmp_path / "adapter_config.json", {"r": 3})
    with pytest.raises(InputError, match="no peft_type"):
        read_adapter(tmp_path)
    write_json(tmp_path / "adapter_config.json", OPTIONS)
    with pytest.raises(InputError, match="cannot read .*adapter_model.safetensors"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="adapter_model.bin"):
        read_adapter(tmp_path)
    with pytest.raises(InputError, match="cannot create"):
        write_adapter(tmp_path / "adapter_model.bin" / "sub", _adapter())


def _small_model():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        pytest.skip("this transformers has no Qwen3_5ForCausalLM")
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=64, hidden_size=48, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=12, full_attention_interval=4, max_position_embeddings=64, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                         "mrope_section": [1, 1, 0]})
    return transformers.Qwen3_5ForCausalLM(config).float().eval()


@pytest.mark.parametrize(("targets", "stabilized"), [("all-linear", False), (["q_proj", "in_proj_qkv", "down_proj"], True)])
def test_peft_reads_back_what_was_written(tmp_path, targets, stabilized):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    base, ids = _small_model(), torch.arange(24)[None] % 64
    with torch.no_grad():
        plain = base(ids, use_cache=False).logits
        lora = peft.LoraConfig(r=RANK, lora_alpha=5, target_modules=targets, use_rslora=stabilized, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, lora).eval()
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
        wanted = model(ids, use_cache=False).logits
        model.save_pretrained(tmp_path / "theirs")

        adapter = read_adapter(tmp_path / "theirs")
        write_adapter(tmp_path / "ours", adapter)
        with warnings.catch_warnings():  # PEFT only warns where it does not find the keys that it wants
            warnings.filterwarnings("error", message="Found missing adapter keys")
            reloaded = peft.PeftModel.from_pretrained(_small_model(), tmp_path / "ours").eval()
        logits = reloaded(ids, use_cache=False).logits

    assert adapter.config.scale == pytest.approx(5 / (RANK**0.5 if stabilized else RANK))
    assert adapter.prefix == TEXT_PREFIX
    assert "layers.3.self_attn.q_proj" in adapter.matrices
    torch.testing.assert_close(logits, wanted, rtol=0, atol=0)
    assert (logits - plain).abs().max() > 1e-2
