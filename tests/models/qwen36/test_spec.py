"""Reading Qwen3.6's `config.json`."""

import dataclasses
from types import MappingProxyType

import pytest

from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.models.qwen36.spec import SPECS, Qwen36Spec, spec_from_hf
from longstraw_jax.models.registry import named_spec, spec_of_config

TEXT = MappingProxyType({
    "model_type": "qwen3_5_text", "vocab_size": 250, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3,
    "full_attention_interval": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 1000, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
})
WANTED = Qwen36Spec(
    vocab_size=250, hidden_size=48, intermediate_size=96, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=10,
    linear_conv_kernel_dim=3, full_attention_interval=3, rms_norm_eps=1e-5, rope_theta=5e6, partial_rotary_factor=0.5,
    max_position_embeddings=1000)
FIELDS = [f.name for f in dataclasses.fields(Qwen36Spec) if f.name in TEXT]


def changed(**values):
    """TEXT with other values; None leaves a field out."""
    return {name: value for name, value in {**TEXT, **values}.items() if value is not None}


def test_text_and_composite():
    assert spec_from_hf(dict(TEXT)) == WANTED
    composite = {"model_type": "qwen3_5", "hidden_size": 7, "vision_config": {"depth": 1}, "text_config": dict(TEXT)}
    assert spec_from_hf(composite) == spec_of_config(composite) == WANTED


def test_a_config_that_transformers_wrote():
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in TEXT.items() if name not in ("model_type", "full_attention_interval")}
    config = transformers.Qwen3_5TextConfig(**sizes, full_attention_interval=3).to_dict()
    assert spec_from_hf(config) == WANTED
    config = transformers.Qwen3_5Config(text_config=config).to_dict()
    assert spec_from_hf(config) == WANTED


def test_derived_sizes():
    assert (WANTED.periods, WANTED.recurrent_per_period, WANTED.rotary_dim) == (2, 2, 8)
    assert WANTED.conv_channels == 2 * 2 * 8 + 6 * 10
    published = SPECS["qwen3.6-27b"]
    assert (published.periods, published.recurrent_per_period) == (16, 3)
    assert (published.rotary_dim, published.conv_channels) == (64, 10_240)


@pytest.mark.parametrize("field", [name for name in FIELDS if name != "full_attention_interval"])
def test_missing_field(field):
    with pytest.raises(InputError, match=f"lacks {field};"):
        spec_from_hf(changed(**{field: None}))


def test_several_missing_fields_are_named_together():
    with pytest.raises(InputError, match="lacks vocab_size, head_dim, rope_theta;"):
        spec_from_hf(changed(vocab_size=None, head_dim=None, rope_parameters=None))


def test_where_the_rope_stands():
    old = changed(rope_parameters=None, rope_theta=5e6, partial_rotary_factor=0.5)
    assert spec_from_hf(old) == WANTED
    assert spec_from_hf(changed(rope_parameters={"rope_theta": 5e6})).partial_rotary_factor == 0.25


LINEAR, FULL = "linear_attention", "full_attention"


def test_layer_types_decide():
    assert spec_from_hf(changed(layer_types=[LINEAR, LINEAR, FULL] * 2, full_attention_interval=4)) == WANTED
    assert spec_from_hf(changed(layer_types=[LINEAR, FULL] * 3)).full_attention_interval == 2
    assert spec_from_hf(changed(full_attention_interval=None, num_hidden_layers=8)).full_attention_interval == 4


@pytest.mark.parametrize("kinds", [
    [LINEAR] * 6, [FULL, LINEAR, LINEAR] * 2, [LINEAR, FULL, LINEAR, LINEAR, LINEAR, FULL],
    [LINEAR, LINEAR, FULL, LINEAR, LINEAR, LINEAR],
])
def test_layer_types_that_are_not_periodic(kinds):
    with pytest.raises(UnsupportedError, match="not periodic"):
        spec_from_hf(changed(layer_types=kinds))


def test_layer_types_of_another_length():
    with pytest.raises(InputError, match="3 layer_types for num_hidden_layers=6"):
        spec_from_hf(changed(layer_types=[LINEAR, LINEAR, FULL]))


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_act", "gelu"), ("attention_bias", True), ("tie_word_embeddings", True), ("attn_output_gate", False),
    ("attention_dropout", 0.1), ("output_gate_type", "sigmoid"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}), ("full_attention_interval", 1),
])
def test_refused_options(field, value):
    name = "rope_type" if field == "rope_parameters" else field
    with pytest.raises(UnsupportedError, match=name):
        spec_from_hf(changed(**{field: value}))


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_size", "48"), ("hidden_size", 48.0), ("hidden_size", True), ("hidden_size", 0), ("head_dim", -16),
    ("rms_norm_eps", "1e-5"), ("num_hidden_layers", 7), ("num_attention_heads", 5), ("linear_num_value_heads", 5),
    ("head_dim", 6),
])
def test_invalid_values(field, value):
    with pytest.raises(InputError, match=field):
        spec_from_hf(changed(**{field: value}))


def test_other_families_and_names():
    with pytest.raises(UnsupportedError, match="model_type is 'llama'; this version supports qwen3_5"):
        spec_of_config({"model_type": "llama"})
    with pytest.raises(InputError, match=r"'qwen4' is neither a directory nor a known name.*qwen3\.6-27b"):
        named_spec("qwen4")
    assert named_spec("qwen3.6-27b") == Qwen36Spec()
