"""Reading GLM-5.2's `config.json`."""

import dataclasses
from types import MappingProxyType

import pytest

from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.models.glm52.spec import SPECS, Glm52Spec, spec_from_hf, spec_to_hf

FULL, SHARED = "full", "shared"
CONFIG = MappingProxyType({
    "model_type": "glm_moe_dsa", "vocab_size": 250, "hidden_size": 48, "intermediate_size": 96, "moe_intermediate_size": 20,
    "num_hidden_layers": 6, "num_attention_heads": 5, "num_key_value_heads": 5, "n_shared_experts": 2, "n_routed_experts": 12,
    "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "first_k_dense_replace": 2, "q_lora_rank": 36, "kv_lora_rank": 28,
    "qk_nope_head_dim": 14, "qk_rope_head_dim": 6, "v_head_dim": 10, "index_topk": 9, "index_n_heads": 4, "index_head_dim": 16,
    "indexer_types": [FULL, SHARED, FULL, FULL, SHARED, SHARED], "rms_norm_eps": 1e-4, "max_position_embeddings": 1000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "tie_word_embeddings": False, "hidden_act": "silu",
})
WANTED = Glm52Spec(
    vocab_size=250, hidden_size=48, intermediate_size=96, moe_intermediate_size=20, num_hidden_layers=6, num_attention_heads=5,
    n_shared_experts=2, n_routed_experts=12, num_experts_per_tok=3, routed_scaling_factor=1.5, first_k_dense_replace=2, q_lora_rank=36,
    kv_lora_rank=28, qk_nope_head_dim=14, qk_rope_head_dim=6, v_head_dim=10, index_topk=9, index_n_heads=4, index_head_dim=16,
    indexer_types=(FULL, SHARED, FULL, FULL, SHARED, SHARED), rms_norm_eps=1e-4, rope_theta=5e6, max_position_embeddings=1000)
FIELDS = [f.name for f in dataclasses.fields(Glm52Spec) if f.name in CONFIG and f.name != "indexer_types"]
# As published (github.com/NVIDIA/TensorRT-LLM/pull/15574 quotes these), but for the explicit list.
SCHEDULE = {"num_hidden_layers": 78, "indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 3}


def changed(**values):
    """CONFIG with other values; None leaves a field out."""
    return {name: value for name, value in {**CONFIG, **values}.items() if value is not None}


def test_fields():
    assert spec_from_hf(dict(CONFIG)) == WANTED
    assert (WANTED.qk_head_dim, WANTED.latent_dim, WANTED.full_layers, WANTED.expert_layers) == (20, 34, (0, 2, 3), (2, 3, 4, 5))


def test_published():
    spec = SPECS["glm5.2"]
    assert spec == Glm52Spec()
    assert spec.full_layers == (0, 1, 2, *range(6, 75, 4)) and len(spec.full_layers) == 21
    assert (spec.qk_head_dim, spec.latent_dim, len(spec.expert_layers)) == (256, 576, 75)


def test_tiny_has_sizes_of_its_own():
    spec = SPECS["glm5.2-tiny"]
    assert spec.indexer_types == (FULL, FULL, FULL, SHARED, SHARED, SHARED, FULL, SHARED)
    others = ("num_hidden_layers", "qk_rope_head_dim", "n_routed_experts", "index_n_heads", "max_position_embeddings")
    sizes = [getattr(spec, f.name) for f in dataclasses.fields(spec) if f.type == "int" and f.name not in others]
    sizes += [spec.qk_head_dim * spec.num_attention_heads, spec.latent_dim]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("name", SPECS)
def test_there_and_back(name):
    assert spec_from_hf(spec_to_hf(SPECS[name])) == SPECS[name]
    other = dataclasses.replace(SPECS[name], q_a_norm_eps=1e-5, kv_a_norm_eps=2e-5, index_k_norm_eps=3e-5)
    assert spec_from_hf(spec_to_hf(other)) == other


def test_a_config_that_transformers_wrote():
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in CONFIG.items() if name != "model_type"}
    assert spec_from_hf(transformers.GlmMoeDsaConfig(**sizes).to_dict()) == WANTED
    assert spec_from_hf(transformers.GlmMoeDsaConfig(**spec_to_hf(WANTED)).to_dict()) == WANTED


@pytest.mark.parametrize("schedule", [
    SCHEDULE, {**SCHEDULE, "index_topk_freq": 3, "index_skip_topk_offset": 1}, {**SCHEDULE, "index_topk_freq": None},
    {**SCHEDULE, "index_topk_pattern": "FFS" * 26}, {**SCHEDULE, "index_topk_pattern": [FULL, SHARED] * 39},
    {**SCHEDULE, "indexer_types": [FULL, SHARED, SHARED] * 26, "index_topk_pattern": "F" * 78},
])
def test_which_layers_select_is_as_in_transformers(schedule):
    transformers = pytest.importorskip("transformers")
    config = changed(**schedule)
    wanted = transformers.GlmMoeDsaConfig(**config).indexer_types
    assert spec_from_hf(config).indexer_types == tuple(wanted)


def test_a_schedule_without_its_offset():
    with pytest.raises(InputError, match="index_topk_freq=4 without index_skip_topk_offset"):
        spec_from_hf(changed(**SCHEDULE | {"index_skip_topk_offset": None}))


def test_head_dim_means_nothing():
    assert spec_from_hf(changed(head_dim=192)) == WANTED  # as published, beside qk_rope_head_dim 64


DENSE, SPARSE = "dense", "sparse"


def test_mlp_layer_types_decide():
    assert spec_from_hf(changed(mlp_layer_types=[DENSE] * 2 + [SPARSE] * 4, first_k_dense_replace=None)) == WANTED
    assert spec_from_hf(changed(mlp_layer_types=[DENSE] * 5 + [SPARSE])).first_k_dense_replace == 5
    assert spec_from_hf(changed(mlp_layer_types=[SPARSE] * 6)).first_k_dense_replace == 0
    assert spec_from_hf(changed(mlp_layer_types=[DENSE] * 6)).expert_layers == ()
    with pytest.raises(UnsupportedError, match="'dense' layers followed by"):
        spec_from_hf(changed(mlp_layer_types=[DENSE, SPARSE] * 3))
    with pytest.raises(InputError, match="2 mlp_layer_types for num_hidden_layers=6"):
        spec_from_hf(changed(mlp_layer_types=[DENSE, SPARSE]))


@pytest.mark.parametrize("field", FIELDS)
def test_missing_field(field):
    with pytest.raises(InputError, match=f"lacks {field};"):
        spec_from_hf(changed(**{field: None}))


def test_several_missing_fields_are_named_together():
    # transformers would take a rope_theta of 10,000
    with pytest.raises(InputError, match="lacks vocab_size, index_topk, rope_theta;"):
        spec_from_hf(changed(vocab_size=None, index_topk=None, rope_parameters=None))


def test_where_the_rope_stands():
    assert spec_from_hf(changed(rope_parameters=None, rope_theta=5e6)) == WANTED
    assert spec_from_hf(changed(rope_parameters=None, rope_scaling={"type": "default"}, rope_theta=5e6)) == WANTED


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("tie_word_embeddings", True), ("attention_dropout", 0.1),
    ("n_group", 4), ("topk_group", 2), ("norm_topk_prob", False), ("scoring_func", "softmax"), ("topk_method", "greedy"),
    ("moe_layer_freq", 2), ("rope_interleave", False), ("indexer_rope_interleave", False), ("num_key_value_heads", 1),
    ("num_experts", 256), ("layer_types", ["full_attention"] * 6), ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
])
def test_refused_options(field, value):
    name = "rope_type" if field == "rope_parameters" else field
    with pytest.raises(UnsupportedError, match=name):
        spec_from_hf(changed(**{field: value}))


def test_options_that_are_the_published_ones():
    assert spec_from_hf(changed(
        n_group=1, topk_group=1, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
        rope_interleave=True, indexer_rope_interleave=True, attention_dropout=0.0, moe_router_dtype="float32", num_experts=12,
        layer_types=["deepseek_sparse_attention"] * 6, num_nextn_predict_layers=1)) == WANTED


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_size", "48"), ("hidden_size", 48.0), ("hidden_size", True), ("hidden_size", 0), ("v_head_dim", -16),
    ("rms_norm_eps", "1e-5"), ("q_a_norm_eps", "1e-6"), ("first_k_dense_replace", 7), ("first_k_dense_replace", -1),
    ("num_experts_per_tok", 13), ("qk_rope_head_dim", 5), ("qk_rope_head_dim", 18), ("indexer_types", [FULL] * 5),
    ("indexer_types", [SHARED] + [FULL] * 5), ("indexer_types", [FULL] * 5 + ["half"]), ("index_topk", 0),
])
def test_invalid_values(field, value):
    with pytest.raises(InputError, match=field):
        spec_from_hf(changed(**{field: value}))
