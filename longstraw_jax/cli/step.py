"""`longstraw step`: the main job, GRPO on a checkpoint and pre-sampled groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from longstraw_jax.cli.display import note, print_receipt, progress
from longstraw_jax.cli.options import Blocks, Gradient, open_mesh, output_file
from longstraw_jax.config import LoraConfig, ObjectiveConfig, OptimizerConfig
from longstraw_jax.errors import InputError
from longstraw_jax.groups import read_groups
from longstraw_jax.kernels_pallas import Implementation, implementation
from longstraw_jax.loading import load_policy, save_adapter
from longstraw_jax.models.adapters import TEXT_PREFIX, read_adapter
from longstraw_jax.models.checkpoint import write_json
from longstraw_jax.tokenizer import load_tokenizer
from longstraw_jax.transaction import Transaction
from longstraw_jax.types import Group


@dataclass(frozen=True)
class Step:
    """One GRPO step (or --steps N) on a Hugging Face checkpoint and pre-sampled groups; writes the updated adapter."""

    model: Path
    """Hugging Face directory: config.json and safetensors."""
    groups: Path
    """JSONL, one group a line: {"prompt_ids": [..], "responses": [{"ids": [..], "reward": x}, ..]}."""
    out: Path
    """Directory for the updated adapter (PEFT format) and receipt.json."""
    adapter: Path | None = None
    """PEFT directory to start from; its rank, alpha and targets count."""
    mesh: str = "context=1"
    """Devices: context=8, or context=2,expert=4. Fake CPU devices where there is no accelerator."""
    steps: int = 1
    """Updates from the same groups; the ratio's denominator stays the first step's policy."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    """Clips the gradient's global norm."""
    rank: int = 16
    """Of a fresh adapter."""
    alpha: float = 32.0
    """Of a fresh adapter; the scale is alpha / rank."""
    targets: str = ""
    """Linear layers of a fresh adapter, as q_proj,down_proj; empty: all of them."""
    normalisation: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0
    """Weight of the k3 estimate of KL(policy || starting policy with its adapter off)."""
    temperature: float = 1.0
    """Of sampling; divides the logits in every log-probability."""
    old_logprobs: Literal["policy", "groups"] = "policy"
    """The ratio's denominator: the starting policy, scored here, or the `logprobs` in the groups file."""
    max_positions: int | None = None
    """Longest prompt + response to accept; default: what the model was published for."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of base weights and activations; auto: the checkpoint's."""
    seed: int = 0
    """Of a fresh adapter."""
    json: Path | None = None
    """Writes the receipts here too."""
    memory: Literal["device", "host"] = "device"
    """Where the prompt's pages lie; `host`: in pinned memory, a layer at a time on the device."""
    weights: Literal["plain", "nf4"] = "plain"
    """How the frozen matrices of the blocks are held: as `--dtype` says, or quantised to four bits (QLoRA) while they are read."""
    implementation: Implementation = "auto"
    """Of the operators that have a GPU kernel: `xla` takes none of them, a kernel's name insists on it."""
    through: Annotated[Gradient, tyro.conf.arg(name="")] = field(default_factory=Gradient)
    blocks: Annotated[Blocks, tyro.conf.arg(name="")] = field(default_factory=Blocks)

    def run(self) -> int:
        with implementation(self.implementation):
            return self._run()

    def _run(self) -> int:
        output_file(self.json)
        _require_writable(self.out)
        if self.steps < 1:
            raise InputError(f"--steps is {self.steps}; wanted at least 1")
        lora = None if self.adapter else LoraConfig(self.rank, self.alpha, tuple(filter(None, self.targets.split(","))))
        gradient = self.through.config()
        objective = ObjectiveConfig(self.normalisation, self.clip_low, self.clip_high, self.kl_beta, self.temperature)
        optimizer = OptimizerConfig(self.optimizer, self.learning_rate, self.weight_decay, self.max_grad_norm)
        prefix = read_adapter(self.adapter).prefix if self.adapter else TEXT_PREFIX
        if not self.model.is_dir():
            raise InputError(f"--model {self.model} is no directory; wanted a Hugging Face directory with config.json")
        groups = read_groups(self.groups, load_tokenizer(self.model))
        old = self._old(groups)
        mesh = open_mesh(self.mesh)
        policy = load_policy(self.model, mesh, adapter=self.adapter, lora=lora, dtype=self.dtype, sizes=self.blocks.sizes(),
                             memory=self.memory, weights=self.weights, seed=self.seed, note=note)
        for group in groups:
            group.check(policy.model.vocabulary, self.max_positions or policy.model.max_positions)
        receipts = []
        with progress("") as report:
            transaction = Transaction(policy, groups, objective, optimizer, gradient, old=old, name=str(self.model), progress=report)
            for _ in range(self.steps):
                receipts.append(transaction.step())
        save_adapter(transaction.policy, self.out, prefix=prefix, base_model=str(self.model))
        shown = [receipt.as_dict() for receipt in receipts]
        write_json(self.out / "receipt.json", shown[0] if self.steps == 1 else {"steps": shown})
        if self.json:
            write_json(self.json, shown[0] if self.steps == 1 else {"steps": shown})
        for receipt in receipts:
            print_receipt(receipt)
        print(f"adapter and receipt written to {self.out}")
        return 0

    def _old(self, groups: list[Group]) -> list[list] | None:
        if self.old_logprobs == "policy":
            return None
        for group in groups:
            for i, response in enumerate(group.responses):
                if response.logprobs is None:
                    raise InputError(f"{group.name}: response {i} has no logprobs; wanted them with --old-logprobs groups")
        return [[response.logprobs for response in group.responses] for group in groups]


def _require_writable(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; wanted a directory, or a name for a new one")
