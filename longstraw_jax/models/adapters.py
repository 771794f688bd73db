"""LoRA adapters as PEFT directories: `adapter_config.json` and `adapter_model.safetensors`, read and written without torch.

The keys of the weights decide what is adapted; `target_modules` may be a list, a pattern or "all-linear", whose meaning
hangs on the model class that PEFT wraps. An option that changes the arithmetic y = W x + scale B A x is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from longstraw_jax.config import LoraConfig
from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.models.checkpoint import PathLike, SafetensorsFile, read_json, write_json, write_safetensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

TEXT_PREFIX = "base_model.model.model."
"""Of the keys for a text-only class (`Qwen3_5ForCausalLM`, which `AutoModelForCausalLM` gives for either checkpoint)."""

COMPOSITE_PREFIX = "base_model.model.model.language_model."
"""Of the keys for the published multimodal class (`Qwen3_5ForConditionalGeneration`)."""

_FLOATS = tuple(np.dtype(dtype) for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))

_KEY = re.compile(r"(?P<prefix>base_model\.model\.model\.(?:language_model\.)?)(?P<module>layers\.\d+\.[\w.]+?)"
                  r"\.lora_(?P<side>[AB])(?:\.default)?\.weight")

_FREE_OPTIONS = frozenset({
    "r", "lora_alpha", "use_rslora", "base_model_name_or_path",  # read
    "target_modules", "exclude_modules", "layers_pattern",  # the keys tell
    "lora_dropout", "inference_mode", "eva_config",  # how it was, or would be, trained
    "auto_mapping", "ensure_weight_tying", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
})
_ONE_OF = {
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Of the options that must have one of a few values. The initialisations left out change the base weights or the forward."""


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """A LoRA adapter on the linear layers of a text model's blocks.

    `matrices`: A [rank, in] and B [out, rank] by module path within the text model, `layers.3.self_attn.q_proj`; any float
    type, kept as it is. `prefix`: what precedes that path in the file's keys, `TEXT_PREFIX` or `COMPOSITE_PREFIX`; PEFT
    drops keys of the wrong one with no more than a warning. `base_model`: the adapted model's name or path, a note for it.
    Raises `InputError` where the matrices do not fit `config` or are not finite.
    """

    config: LoraConfig
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
    prefix: str = TEXT_PREFIX
    base_model: str | None = None

    def __post_init__(self):
        if self.prefix not in (TEXT_PREFIX, COMPOSITE_PREFIX):
            raise InputError(f"adapter key prefix is {self.prefix!r}; wanted {TEXT_PREFIX!r} or {COMPOSITE_PREFIX!r}")
        if not self.matrices:
            raise InputError("the adapter holds no LoRA matrices; wanted an A and a B for one linear layer at least")
        for module, (a, b) in self.matrices.items():
            if not _KEY.fullmatch(self.key(module, "A")):
                raise InputError(f"adapted module is {module!r}; wanted a path within the text model, layers.<number>.<...>")
            self._check(self.key(module, "A"), a, rank_axis=0)
            self._check(self.key(module, "B"), b, rank_axis=1)
        targets = target_names(self.matrices)
        if self.config.targets and set(self.config.targets) != set(targets):
            given = ", ".join(sorted(self.config.targets))
            raise InputError(f"lora targets are {given}; wanted those of the matrices: {', '.join(targets)}")

    def key(self, module: str, side: str) -> str:
        """The key of a matrix in the weights file; `side` is "A" or "B"."""
        return f"{self.prefix}{module}.lora_{side}.weight"

    def _check(self, key: str, matrix: np.ndarray, rank_axis: int) -> None:
        if matrix.dtype not in _FLOATS:
            raise InputError(f"{key} is {matrix.dtype}; wanted one of {', '.join(map(str, _FLOATS))}")
        if matrix.ndim != 2 or matrix.shape[rank_axis] != self.config.rank or 0 in matrix.shape:
            wanted = f"[{self.config.rank}, in]" if rank_axis == 0 else f"[out, {self.config.rank}]"
            raise InputError(f"{key} is {list(matrix.shape)}; wanted {wanted} for rank {self.config.rank}")
        if not np.isfinite(matrix).all():
            raise InputError(f"{key} holds values that are not finite; wanted an adapter saved before it diverged")


def target_names(modules: Iterable[str]) -> tuple[str, ...]:
    """The last parts of module paths, sorted: PEFT's `target_modules`, and `LoraConfig.targets`."""
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))


def read_adapter(directory: PathLike) -> PeftAdapter:
    """Reads a PEFT LoRA directory.

    `lora_dropout` is read over: it acts in PEFT's training mode only, and no pass of this package drops anything. Raises
    `UnsupportedError` for an option or a key that plain LoRA on linear layers does not have, `InputError` for a damaged one.
    """
    directory = Path(directory)
    if not directory.is_dir():
        given = "is not a directory" if directory.exists() else "does not exist"
        raise InputError(f"adapter directory {directory} {given}; wanted a PEFT directory with {CONFIG_FILE}")
    options = read_json(directory / CONFIG_FILE)
    _refuse_options(options, directory / CONFIG_FILE)
    file = _open_weights(directory)
    prefix, pairs = _pair_keys(file.shapes, file.path)
    config = _lora_config(options, directory / CONFIG_FILE, target_names(pairs))
    try:
        matrices = {module: (file.read(a), file.read(b)) for module, (a, b) in pairs.items()}
        return PeftAdapter(config, matrices, prefix, options.get("base_model_name_or_path"))
    except InputError as error:
        raise InputError(f"{file.path}: {error}") from None


def _open_weights(directory: Path) -> SafetensorsFile:
    if not (directory / WEIGHTS_FILE).exists() and (directory / "adapter_model.bin").exists():
        raise UnsupportedError(f"{directory} holds adapter_model.bin; this version reads {WEIGHTS_FILE} only: "
                               "save it with safe_serialization=True")
    return SafetensorsFile(directory / WEIGHTS_FILE)


def _refuse_options(options: Mapping, path: Path) -> None:
    """Lets an unknown option pass only where it is off, so that a later PEFT's extension is refused rather than ignored."""
    if "peft_type" not in options:
        raise InputError(f"{path} has no peft_type; wanted the configuration of a PEFT adapter")
    for name, value in options.items():
        if name in _ONE_OF:
            if not any(type(value) is type(one) and value == one for one in _ONE_OF[name]):
                wanted = ", ".join(map(repr, _ONE_OF[name]))
                raise UnsupportedError(f"{path}: {name} is {value!r}; this version supports {wanted} only")
        elif name not in _FREE_OPTIONS and (value or name == "layers_to_transform" and value is not None):
            raise UnsupportedError(f"{path}: {name} is {value!r}; this version supports plain LoRA, without it, only")


def _lora_config(options: Mapping, path: Path, targets: tuple[str, ...]) -> LoraConfig:
    kinds = {"r": (int,), "lora_alpha": (int, float), "use_rslora": (bool,), "base_model_name_or_path": (str, type(None))}
    values = {"use_rslora": False, "base_model_name_or_path": None, **options}
    for name, kind in kinds.items():
        if type(values.get(name)) not in kind:
            raise InputError(f"{path}: {name} is {values.get(name)!r}; wanted {' or '.join(k.__name__ for k in kind)}")
    return LoraConfig(values["r"], float(values["lora_alpha"]), targets, rank_stabilized=values["use_rslora"])


def _pair_keys(keys: Iterable[str], path: Path) -> tuple[str, dict[str, tuple[str, str]]]:
    """The prefix, and the keys of A and B by module."""
    sides: dict[str, dict[str, str]] = {}
    prefixes = set()
    for key in keys:
        match = _KEY.fullmatch(key)
        if not match:
            raise UnsupportedError(f"{path} holds {key}; this version supports LoRA on the blocks' linear layers only, "
                                   f"keys {TEXT_PREFIX}[language_model.]layers.<number>.<...>.lora_A.weight or lora_B")
        prefixes.add(match["prefix"])
        if sides.setdefault(match["module"], {}).setdefault(match["side"], key) != key:
            raise InputError(f"{path} holds both {sides[match['module']][match['side']]} and {key}; wanted one adapter")
    if len(prefixes) != 1:
        given = f"keys of {len(prefixes)} model classes ({', '.join(sorted(prefixes))})" if prefixes else "no matrices"
        raise InputError(f"{path} holds {given}; wanted the adapter of one model")
    for found in sides.values():
        if len(found) != 2:
            (side, key), = found.items()
            raise InputError(f"{path} holds {key} without its lora_{'B' if side == 'A' else 'A'}; wanted both")
    return prefixes.pop(), {module: (found["A"], found["B"]) for module, found in sides.items()}


def write_adapter(directory: PathLike, adapter: PeftAdapter) -> None:
    """Writes `adapter` as a PEFT directory, which is created where it is missing; other files in it stay untouched.

    Each file is replaced as a whole, the weights first. `target_modules` are last parts of names: where only some of the
    layers that have such a module are adapted, PEFT puts a pair that adds 0 on the others and warns that it lacks weights.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create {directory}: {error.strerror}; wanted a directory that can be written") from None
    tensors = {adapter.key(module, side): matrix for module, pair in adapter.matrices.items()
               for side, matrix in zip("AB", pair, strict=True)}
    write_safetensors(directory / WEIGHTS_FILE, tensors)
    write_json(directory / CONFIG_FILE, _options(adapter))


def _options(adapter: PeftAdapter) -> dict:
    alpha = adapter.config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "inference_mode": True,
        "r": adapter.config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,  # a whole number in PEFT's own type
        "lora_dropout": 0.0,
        "use_rslora": adapter.config.rank_stabilized,
        "use_dora": False,
        "target_modules": list(target_names(adapter.matrices)),
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
