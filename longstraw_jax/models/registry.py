"""The model families, by name and by `config.json`."""

from __future__ import annotations

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.models.base import Model
from longstraw_jax.models.qwen36 import spec as qwen36
from longstraw_jax.models.qwen36.model import Qwen36Model
from longstraw_jax.sharding import Owners

SPECS = {**qwen36.SPECS}
"""Specs that have a name."""

Spec = qwen36.Qwen36Spec


def named_spec(name: str) -> Spec:
    if name not in SPECS:
        raise InputError(f"model {name!r} is neither a directory nor a known name; wanted a Hugging Face directory or one of "
                         f"{', '.join(SPECS)}")
    return SPECS[name]


def spec_of_config(config: dict) -> Spec:
    """The spec of a `config.json`."""
    kind = config.get("model_type")
    if kind in qwen36.MODEL_TYPES:
        return qwen36.spec_from_hf(config)
    raise UnsupportedError(f"config.json model_type is {kind!r}; this version supports {', '.join(qwen36.MODEL_TYPES)}")


def make_model(spec: Spec, owners: Owners, *, dtype: str, lora: LoraConfig | None, sizes: BlockSizes) -> Model:
    """The family's model. Raises where the spec cannot run on that many owners or has no such adapter targets."""
    return Qwen36Model(spec, owners, dtype, lora, sizes)
