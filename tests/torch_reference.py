"""Tiny random Qwen3.6 checkpoints by transformers and PyTorch, and how they are loaded again."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

TINY = dict(
    vocab_size=256, hidden_size=80, intermediate_size=160, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
    head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4, full_attention_interval=4, max_position_embeddings=4096, rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                     "mrope_interleaved": True},
)
"""Small, but with every ratio and size distinct, so that a swapped split, head order or transpose shows in the numbers."""

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


def load_torch(directory: str | Path, *, attention: str = "eager") -> Qwen3_5ForCausalLM:
    """The text model of a plain or composite checkpoint, in float32 and eval mode."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()


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


def _save_composite(text: Qwen3_5ForCausalLM, directory: str | Path) -> None:
    vision = {**TINY_VISION, "out_hidden_size": text.config.hidden_size}
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=False)
    whole = Qwen3_5ForConditionalGeneration(config).float()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    hidden = text.config.hidden_size
    whole.save_pretrained(directory, state_dict={**whole.state_dict(), "mtp.fc.weight": torch.zeros(hidden, 2 * hidden)})
