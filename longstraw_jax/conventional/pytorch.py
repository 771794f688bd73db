"""The conventional step by PyTorch and transformers. Imported only where they are installed.

Written for transformers 5.24, which calls a forward's cache `cache` (before: `past_key_values`).
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from longstraw_jax.loading import to_weights
from longstraw_jax.models import parameters
from longstraw_jax.models.checkpoint import write_json, write_safetensors
from longstraw_jax.policy import Policy
from longstraw_jax.types import Group


def pytorch_gradient(policy: Policy, group: Group) -> dict[str, np.ndarray]:
    """d loss / d trainable by checkpoint name, of the whole sequences' GRPO loss at ratio 1, in float32.

    Adapters are merged into the weights, W + s B A, and their gradients taken from the merged weight's: dA = s B^T dW,
    dB = s dW A^T (Hu et al., 2021, eq. 3). So nothing but transformers' own model is needed.
    """
    weights = {name: np.asarray(x, np.float32) for name, x in to_weights(policy).items()}
    trained = set(parameters.to_host(policy.trainable, policy.model.abstract_parameters()[0]))
    scale = policy.model.lora.scale if policy.model.lora else 0.0
    adapted = {name.removesuffix(".lora_A") for name in trained if name.endswith(".lora_A")}
    base = {name: x for name, x in weights.items() if not name.endswith((".lora_A", ".lora_B"))}
    for module in adapted:
        base[module + ".weight"] = base[module + ".weight"] + scale * weights[module + ".lora_B"] @ weights[module + ".lora_A"]
    model = _model(base, policy.model.hf_config())
    response_step(model, group.prompt_ids, [r.ids for r in group.responses], group.advantages.tolist(),
                  [r.mask for r in group.responses], detach_prompt=False)
    gradient = dict(_gradients(model))
    for module in adapted:
        grown = gradient[module + ".weight"]
        gradient[module + ".lora_A"] = scale * weights[module + ".lora_B"].T @ grown
        gradient[module + ".lora_B"] = scale * grown @ weights[module + ".lora_A"].T
    return {name: gradient[name] for name in trained}


def _model(weights: dict[str, np.ndarray], config: dict) -> torch.nn.Module:
    """transformers' model, read from files as users' are: its names in memory may be others than those on disk."""
    with tempfile.TemporaryDirectory() as directory:
        write_safetensors(Path(directory, "model.safetensors"), weights)
        write_json(Path(directory, "config.json"), config)
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()


def _gradients(model: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter's gradient by its name on disk, where each routed expert has matrices of its own."""
    for name, p in model.named_parameters():
        gradient = np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            yield name, gradient
            continue
        prefix, _, projections = name.rpartition(".")
        for e, matrix in enumerate(gradient):
            parts = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]} if projections == "gate_up_proj" \
                else {"down_proj": matrix}
            yield from ((f"{prefix}.{e}.{part}.weight", x) for part, x in parts.items())


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
