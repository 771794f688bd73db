"""Options that a user sets, as small frozen dataclasses. No JAX here: they are read before a device exists."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longstraw_jax.errors import InputError


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InputError(message)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the linear layers (Hu et al., 2021): y = W x + (alpha / rank) B A x.

    `targets` are the last parts of the linear layers' names (`q_proj`, `down_proj`, ...); empty means every linear layer of
    the blocks. `rank_stabilized` divides alpha by sqrt(rank) instead (PEFT's `use_rslora`).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    rank_stabilized: bool = False

    def __post_init__(self):
        _require(self.rank >= 1, f"lora rank is {self.rank}; wanted a whole number >= 1")
        _require(math.isfinite(self.alpha) and self.alpha > 0, f"lora alpha is {self.alpha}; wanted a finite number > 0")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class BlockSizes:
    """How the work is cut. None of these changes a result (beyond rounding); they trade memory against launches.

    All are in tokens. `page`: tokens a context owner holds in a row. `chunk`: prompt tokens captured by one program call, over
    all owners. `block`: response tokens replayed at a time, over all owners. `queries`, `keys`: the attention tile of one
    owner. `logits`: tokens whose logits exist at once, per owner. `recurrence`: tokens of one chunk of the delta rule.
    """

    page: int = 64
    chunk: int = 16_384
    block: int = 2_048
    queries: int = 256
    keys: int = 1_024
    logits: int = 128
    recurrence: int = 64

    def __post_init__(self):
        for name, value in vars(self).items():
            _require(isinstance(value, int) and value >= 1, f"block size {name} is {value!r}; wanted a whole number >= 1")
        _require(self.recurrence & (self.recurrence - 1) == 0, f"block size recurrence is {self.recurrence}; wanted a power of two")


NORMALISATIONS = ("grpo", "dapo", "dr_grpo")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The clipped GRPO surrogate (Shao et al., 2024, eq. 3).

    `normalisation`: `grpo` averages over a response's trained tokens, then over the group; `dapo` averages over all trained
    tokens of the group (Yu et al., 2025, eq. 8); `dr_grpo` divides by group size times the length of the longest response,
    masked tokens included (Liu et al., 2025). `kl_beta` weighs the k3 estimate of KL(policy || reference); 0 leaves the
    reference out altogether. `temperature` divides the logits wherever a log-probability is taken.
    """

    normalisation: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0
    temperature: float = 1.0

    def __post_init__(self):
        _require(self.normalisation in NORMALISATIONS,
                 f"normalisation is {self.normalisation!r}; wanted one of {', '.join(NORMALISATIONS)}")
        _require(0 <= self.clip_low < 1, f"clip_low is {self.clip_low}; wanted 0 <= clip_low < 1")
        _require(0 <= self.clip_high < math.inf, f"clip_high is {self.clip_high}; wanted a finite number >= 0")
        _require(0 <= self.kl_beta < math.inf, f"kl_beta is {self.kl_beta}; wanted a finite number >= 0")
        _require(0 < self.temperature < math.inf, f"temperature is {self.temperature}; wanted a finite number > 0")


OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer call per group step. `max_grad_norm` clips the global norm first; None leaves it alone."""

    name: str = "adamw"
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self):
        _require(self.name in OPTIMIZERS, f"optimizer is {self.name!r}; wanted one of {', '.join(OPTIMIZERS)}")
        _require(0 <= self.learning_rate < math.inf, f"learning rate is {self.learning_rate}; wanted a finite number >= 0")
        _require(0 <= self.weight_decay < math.inf, f"weight decay is {self.weight_decay}; wanted a finite number >= 0")
        _require(self.max_grad_norm is None or 0 < self.max_grad_norm < math.inf,
                 f"max_grad_norm is {self.max_grad_norm}; wanted a finite number > 0, or none")


GRADIENTS = ("response", "full")


@dataclass(frozen=True)
class GradientConfig:
    """Which tokens the loss is differentiated through.

    `kind`: `response` holds the prompt's state fixed (LongStraw, 2026); `full` is the gradient of the whole sequence's loss.
    `prompt_gradient_window`: with `full`, go back through this many captured positions only and hold the state before them
    fixed; None goes back to the prompt's beginning. `measure_cosine`: also report the cosine of the gradient that is used to
    the full one; that costs a full sweep and a second cotangent of the state. `entry_states`: where the recurrent states at the
    chunks' entries wait for the sweep, "device" or "host".
    """

    kind: str = "response"
    prompt_gradient_window: int | None = None
    measure_cosine: bool = False
    entry_states: str = "device"

    def __post_init__(self):
        window = self.prompt_gradient_window
        _require(self.kind in GRADIENTS, f"gradient is {self.kind!r}; wanted one of {', '.join(GRADIENTS)}")
        _require(window is None or isinstance(window, int) and window >= 0,
                 f"prompt_gradient_window is {window!r}; wanted a whole number of positions >= 0, or none")
        _require(window is None or self.kind == "full",
                 f"prompt_gradient_window is {window} and gradient is {self.kind!r}; wanted gradient 'full' with a window")
        _require(self.entry_states in ("device", "host"), f"entry_states is {self.entry_states!r}; wanted 'device' or 'host'")

    @classmethod
    def of(cls, given: str | GradientConfig) -> GradientConfig:
        """A kind by its name stands for that kind without further options."""
        return cls(given) if isinstance(given, str) else given

    def fixed(self, captured: int) -> int:
        """How many of the captured positions are held fixed."""
        if self.kind == "response":
            return captured
        return 0 if self.prompt_gradient_window is None else max(0, captured - self.prompt_gradient_window)

    def reach(self, captured: int) -> int:
        """The first position that a sweep must come down to; `captured` where there is no sweep."""
        return 0 if self.measure_cosine else self.fixed(captured)
