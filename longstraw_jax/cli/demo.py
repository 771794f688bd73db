"""`longstraw demo`: the same transaction as `step`, with nothing to prepare."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from jax.sharding import Mesh

from longstraw_jax.cli.display import note, print_receipt, progress
from longstraw_jax.cli.options import Blocks, Gradient, open_mesh, output_file
from longstraw_jax.config import BlockSizes, GradientConfig, LoraConfig, OptimizerConfig
from longstraw_jax.errors import InputError
from longstraw_jax.loading import load_policy
from longstraw_jax.models.checkpoint import write_json
from longstraw_jax.models.registry import SPECS
from longstraw_jax.receipts import Receipt
from longstraw_jax.tokenizer import load_tokenizer
from longstraw_jax.transaction import Transaction
from longstraw_jax.types import Group, Response

_CPU_SIZES = BlockSizes(chunk=2048, block=256, queries=256, keys=512, logits=64)


@dataclass(frozen=True)
class Demo:
    """Capture, score, replay and update on this machine: tiny models, a real long text, fake CPU devices if need be."""

    model: str = "tiny"
    """A spec's name (random weights), a Hugging Face directory, or `tiny`: a tiny spec of every family, one after the other."""
    prompt_file: Path | None = None
    """Text to take the prompt from; default: the sources of Python's own library."""
    prompt_length: int = 4096
    """Tokens."""
    response_length: int = 64
    """Tokens of each response."""
    group: int = 4
    """Responses."""
    mesh: str = "context=2,expert=2"
    """Devices: context=8, or context=2,expert=4. Fake CPU devices where there is no accelerator."""
    steps: int = 2
    """Updates from the same group."""
    learning_rate: float = 1e-3
    seed: int = 0
    """Of weights and adapter."""
    json: Path | None = Path("longstraw-demo.json")
    """The receipts."""
    memory: Literal["device", "host"] = "device"
    """Where the prompt's pages lie; `host`: in pinned memory, a layer at a time on the device."""
    weights: Literal["plain", "nf4"] = "plain"
    """How the frozen matrices of the blocks are held: as they are, or quantised to four bits (QLoRA)."""
    through: Annotated[Gradient, tyro.conf.arg(name="")] = field(default_factory=Gradient)
    blocks: Annotated[Blocks, tyro.conf.arg(name="")] = field(default_factory=Blocks)

    def run(self) -> int:
        output_file(self.json)
        for name, least in (("prompt_length", 2), ("response_length", 1), ("group", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; wanted at least {least}")
        gradient, mesh = self.through.config(), open_mesh(self.mesh)
        models = [name for name in SPECS if name.endswith("-tiny")] if self.model == "tiny" else [self.model]
        receipts = [receipt for model in models for receipt in self._train(model, mesh, gradient)]
        if self.json:
            write_json(self.json, {**receipts[-1].as_dict(), "steps": [receipt.as_dict() for receipt in receipts]})
            print(f"receipts written to {self.json}")
        return 0

    def _train(self, model: str, mesh: Mesh, gradient: GradientConfig) -> Iterator[Receipt]:
        group = text_group(self._tokens(model), self.prompt_length, self.response_length, self.group)
        policy = load_policy(model, mesh, lora=LoraConfig(rank=8, alpha=16), sizes=self.blocks.sizes(_CPU_SIZES),
                             memory=self.memory, weights=self.weights, seed=self.seed, note=note)
        group.check(policy.model.vocabulary, policy.model.max_positions)
        transaction = Transaction(policy, [group], optimizer=OptimizerConfig("adamw", self.learning_rate), gradient=gradient, name=model)
        for step in range(self.steps):
            with progress(f"step {step + 1}") as report:
                transaction.progress = report
                receipt = transaction.step()
            print_receipt(receipt)
            yield receipt

    def _tokens(self, model: str) -> np.ndarray:
        """Enough tokens for the prompt and all responses: the model's tokenizer where it has one, else bytes."""
        wanted = self.prompt_length + self.response_length * self.group
        tokenizer = load_tokenizer(model) if Path(model).is_dir() else None
        data = _read(self.prompt_file, wanted) if tokenizer is None else _read(self.prompt_file, 8 * wanted)
        tokens = np.frombuffer(data, np.uint8) if tokenizer is None else \
            np.asarray(tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False))
        if len(tokens) < wanted:
            raise InputError(f"the text holds {len(tokens)} tokens; wanted {wanted} for the prompt and {self.group} responses: give a "
                             "longer --prompt-file, or a smaller --prompt-length")
        return tokens[:wanted].astype(np.int32)


def text_group(tokens: np.ndarray, prompt: int, response: int, members: int) -> Group:
    """A prompt and stretches of the same text as its responses; the reward is the share of tokens that the text goes on with."""
    rest = tokens[prompt : prompt + response * members].reshape(members, response)
    return Group(tokens[:prompt], tuple(Response(row, reward=float((row == rest[0]).mean())) for row in rest), "text")


def _read(path: Path | None, size: int) -> bytes:
    if path is None:
        return _library_sources(size)
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise InputError(f"--prompt-file {path} cannot be read ({error.strerror}); wanted a text file") from None


def _library_sources(size: int) -> bytes:
    """The beginning of Python's own library, file after file by name."""

    def files() -> Iterator[Path]:
        yield from sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        yield from sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py"))

    data = bytearray()
    for file in files():
        data += file.read_bytes()
        if len(data) >= size:
            break
    return bytes(data[:size])
