"""The model families, by name and by `config.json`."""

from __future__ import annotations

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.models.base import Model
from longstraw_jax.models.glm52 import spec as glm52
from longstraw_jax.models.glm52.model import Glm52Model
from longstraw_jax.models.qwen36 import spec as qwen36
from longstraw_jax.models.qwen36.model import Qwen36Model
from longstraw_jax.sharding import AnyMesh, Owners, platform_of

SPECS = {**qwen36.SPECS, **glm52.SPECS}
"""Specs that have a name."""

Spec = qwen36.Qwen36Spec | glm52.Glm52Spec


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
    if kind in glm52.MODEL_TYPES:
        return glm52.spec_from_hf(config)
    known = ", ".join((*qwen36.MODEL_TYPES, *glm52.MODEL_TYPES))
    raise UnsupportedError(f"config.json model_type is {kind!r}; this version supports {known}")


def make_model(
    spec: Spec, mesh: AnyMesh, *, dtype: str, lora: LoraConfig | None, sizes: BlockSizes, memory: str = "device",
    weights: str = "plain",
) -> Model:
    """The family's model on a mesh. Raises where the spec cannot run on it or has no such adapter targets."""
    if isinstance(spec, glm52.Glm52Spec):
        # XLA has the ragged collective for accelerators only
        exchange = "gather" if platform_of(mesh) == "cpu" else "ragged"
        return Glm52Model(spec, Owners.of(mesh), Owners.of(mesh, "expert"), dtype, lora, sizes, memory, weights, expert_exchange=exchange)
    return Qwen36Model(spec, Owners.of(mesh), dtype, lora, sizes, memory, weights)
