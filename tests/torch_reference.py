"""Qwen3.6 by transformers and PyTorch: tiny random checkpoints, and the GRPO step that ours must agree with.

Written for transformers 5.24, which calls a forward's cache `cache` (before: `past_key_values`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Objective:
    clip_low: float
    clip_high: float
    kl_beta: float

    def sum(self, new, old, reference, mask, advantage):
        """The loss summed over a response's trained tokens (Shao et al., 2024, eq. 3 and 4); all but `advantage` are [R]."""
        ratio = torch.exp(new - old)
        clipped = torch.clamp(ratio, 1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if self.kl_beta:
            loss = loss + self.kl_beta * (torch.exp(reference - new) - (reference - new) - 1)
        return (loss * mask).sum()


def response_step(
    model, prompt_ids, responses, advantages, masks=None, *, detach_prompt: bool, clip_low: float = 0.2,
    clip_high: float = 0.2, kl_beta: float = 0.0, ref_logprobs=None, old_logprobs=None, gradient_checkpointing: bool = False,
    temperature: float = 1.0,
) -> tuple[float, list[torch.Tensor]]:
    """The GRPO loss of one group, its gradient added to `.grad` of the parameters that require one, member by member.

    Per member i: `responses[i]`, `masks[i]`, `old_logprobs[i]`, `ref_logprobs[i]` are [R_i], `advantages[i]` is a number.
    The loss averages over a member's unmasked tokens, then over the group. Without `old_logprobs` the ratio is 1 at this
    policy; `ref_logprobs` are needed where kl_beta > 0. `detach_prompt` fixes the state of prompt_ids[:-1], so that only the
    last prompt token and the response are differentiated; otherwise the whole sequence is. Returns the loss and each
    member's log-probabilities [R_i], detached.
    """
    if detach_prompt and gradient_checkpointing:
        raise ValueError("transformers drops the cache under gradient checkpointing; wanted detach_prompt or it, not both")
    if kl_beta and ref_logprobs is None:
        raise ValueError(f"kl_beta is {kl_beta} but ref_logprobs is None; wanted the reference policy's log-probabilities")
    objective = _Objective(clip_low, clip_high, kl_beta)
    prompt = torch.tensor(prompt_ids, dtype=torch.long, device=model.device)
    state = _prompt_state(model, prompt) if detach_prompt else None
    loss, scored = 0.0, []
    _set_checkpointing(model, gradient_checkpointing)
    try:
        for i, (response, advantage) in enumerate(zip(responses, advantages, strict=True)):
            new = _logprobs(model, prompt, response, state, temperature)
            old, reference, mask = (_like(new, per_member, i) for per_member in (old_logprobs, ref_logprobs, masks))
            old = new.detach() if old is None else old
            mask = torch.ones_like(new) if mask is None else mask
            share = objective.sum(new, old, reference, mask, advantage) / (mask.sum().clamp(min=1) * len(responses))
            share.backward()
            loss += share.detach().item()
            scored.append(new.detach())
    finally:
        _set_checkpointing(model, False)
    return loss, scored


def _like(new, per_member, i: int):
    """Member i's values as a tensor beside its log-probabilities, or None where none are given."""
    return None if per_member is None else torch.tensor(per_member[i], dtype=new.dtype, device=new.device)


def _set_checkpointing(model, on: bool) -> None:
    # transformers checkpoints in training mode only; no model here has dropout, so the mode changes nothing else.
    if on:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    elif model.is_activation_checkpointing:
        model.activation_checkpointing_disable()
    model.train(on)


@torch.no_grad()
def _prompt_state(model, prompt):
    """The cache after all prompt tokens but the last, or None where there are none."""
    if len(prompt) == 1:
        return None
    return model(input_ids=prompt[None, :-1], use_cache=True, logits_to_keep=1).cache


def _logprobs(model, prompt, response, state, temperature):
    """log p of each response token [R], from the given prompt state or else over the whole sequence in one pass."""
    response = torch.tensor(response, dtype=torch.long, device=prompt.device)
    count = len(response)
    if state is None:
        sequence, start = torch.cat([prompt, response[:-1]]), 0
        options = {"use_cache": False}
    else:
        sequence, start = torch.cat([prompt[-1:], response[:-1]]), len(prompt) - 1
        options = {"use_cache": True, "cache": _branch(state)}
    positions = torch.arange(start, start + len(sequence), device=prompt.device)
    logits = model(input_ids=sequence[None], position_ids=positions[None], logits_to_keep=count, **options).logits[0]
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    return scores.gather(-1, response[:, None])[:, 0]


def _branch(state):
    """A copy of the prompt's cache that a member may extend under autograd."""
    branch = copy.deepcopy(state)
    for layer in branch.layers:
        if hasattr(layer, "recurrent_states"):
            # The layer would copy its last state over the entry state, which autograd has saved for the backward pass.
            # Nothing follows a member, so that last state is not kept.
            layer.update_recurrent_state = lambda states, *args, **kwargs: states
    return branch
