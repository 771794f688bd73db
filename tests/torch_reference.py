"""Tiny random checkpoints of both families by transformers and PyTorch, and how they are loaded again."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

# PyTorch's threads spin while they wait for each other: where anything else runs, two are ten times as slow as one.
torch.set_num_threads(1)

TINY = dict(
    vocab_size=256, hidden_size=80, intermediate_size=160, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
    head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4, full_attention_interval=4, max_position_embeddings=4096, rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                     "mrope_interleaved": True},
)
"""Small, but with every ratio and size distinct, so that a swapped split, head order or transpose shows in the numbers."""

TINY_GLM = dict(
    vocab_size=256, hidden_size=80, intermediate_size=160, moe_intermediate_size=24, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=6, n_shared_experts=1, n_routed_experts=10, num_experts_per_tok=3, routed_scaling_factor=2.5,
    first_k_dense_replace=2, q_lora_rank=56, kv_lora_rank=40, qk_nope_head_dim=20, qk_rope_head_dim=8, v_head_dim=18, index_topk=12,
    index_n_heads=16, index_head_dim=26, indexer_types=["full", "full", "shared", "full", "shared", "shared"],
    max_position_embeddings=4096, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 8e6},
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)
"""Likewise. With fewer heads the indexer's scores are often exactly 0 for several positions, and PyTorch breaks ties as it likes."""

TINY_VISION = dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=80, patch_size=4,
                   num_position_embeddings=16)


def build_tiny_qwen(directory: str | Path, *, seed: int = 0, composite: bool = False, **config_overrides):
    """Saves a random checkpoint (float32) and returns its text model, eager and in eval mode.

    `composite` saves it as the published checkpoint is laid out: text weights under `model.language_model.`, beside a vision
    tower (`model.visual.`) and a multi-token-prediction head (`mtp.`) that a text loader leaves alone.
    """
    config = Qwen3_5TextConfig(**{**TINY, **config_overrides}, attn_implementation="eager")
    model = Qwen3_5ForCausalLM(config).float().eval()
    _randomise(model, torch.Generator().manual_seed(seed))
    if composite:
        _save_composite(model, directory)
    else:
        model.save_pretrained(directory)
    return model


def build_tiny_glm(directory: str | Path, *, seed: int = 0, **config_overrides) -> GlmMoeDsaForCausalLM:
    """Saves a random GLM-5.2 checkpoint (float32, one tensor per expert) and returns its model, eager and in eval mode."""
    config = GlmMoeDsaConfig(**{**TINY_GLM, **config_overrides}, attn_implementation="eager", experts_implementation="eager")
    model = GlmMoeDsaForCausalLM(config).float().eval()
    _randomise_glm(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(directory)
    return model


def load_torch(directory: str | Path, *, attention: str = "eager") -> PreTrainedModel:
    """The text model of either family's checkpoint, in float32 and eval mode, its experts (if any) one after another."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
    ).eval()


@torch.no_grad()
def _randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    # transformers initialises norms and dt_bias to constants, for which a missing `1 + w` is invisible.
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.05, 4.0, generator=generator).log_()
            continue
        spread = parameter.shape[-1] ** -0.5
        for part, value in (("embed_tokens", 1.0), ("norm", 0.2), ("conv1d", 0.4), ("dt_bias", 0.5)):
            spread = value if part in name else spread
        centre = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
        parameter.normal_(centre, spread, generator=generator)


@torch.no_grad()
def _randomise_glm(model: GlmMoeDsaForCausalLM, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        spread = 1.0 if "embed_tokens" in name else 0.2 if "norm." in name else parameter.shape[-1] ** -0.5
        parameter.normal_(centre, spread, generator=generator)
    for layer in model.model.layers:
        attention = layer.self_attn
        # The inputs of the norms with an epsilon of their own are small, so that a wrong epsilon shows.
        attention.q_a_proj.weight.mul_(0.03)
        attention.kv_a_proj_with_mqa.weight[: attention.kv_lora_rank].mul_(0.03)
        if attention.indexer is not None:
            attention.indexer.wk.weight.mul_(0.01)
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.1, generator=generator)


def _save_composite(text: Qwen3_5ForCausalLM, directory: str | Path) -> None:
    vision = {**TINY_VISION, "out_hidden_size": text.config.hidden_size}
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=False)
    whole = Qwen3_5ForConditionalGeneration(config).float()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    hidden = text.config.hidden_size
    whole.save_pretrained(directory, state_dict={**whole.state_dict(), "mtp.fc.weight": torch.zeros(hidden, 2 * hidden)})
