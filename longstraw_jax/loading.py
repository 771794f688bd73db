"""From a Hugging Face directory (and a PEFT adapter) to a policy, and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from longstraw_jax.config import BlockSizes, LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models import parameters
from longstraw_jax.models.adapters import TEXT_PREFIX, PeftAdapter, read_adapter, target_names, write_adapter
from longstraw_jax.models.base import Model, Parameter, Tree
from longstraw_jax.models.checkpoint import SafetensorsDirectory, match_names, read_config
from longstraw_jax.models.registry import make_model, named_spec, spec_of_config
from longstraw_jax.policy import Policy, random_policy

DTYPES = ("auto", "bfloat16", "float32", "float64")


def load_policy(
    model: str | os.PathLike, mesh: Mesh, *, adapter: str | os.PathLike | None = None, lora: LoraConfig | None = None,
    trainable: str = "lora", dtype: str = "auto", sizes: BlockSizes | None = None, memory: str = "device",
    weights: str = "plain", seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> Policy:
    """A policy on a mesh, every device reading just its own shards.

    Args:
      model: a Hugging Face directory (config.json and safetensors), or a spec's name for random weights.
      adapter: a PEFT directory to start from; its rank, alpha and targets count.
      lora: a fresh adapter where none is given (default: rank 16 on every linear layer).
      trainable: "lora", or "all" for every parameter and no adapter.
      dtype: of base weights and activations; "auto" takes float32 where the checkpoint has it, else bfloat16.
      memory: where prompts' pages lie, "device", or "host": in its pinned memory, a layer at a time on the device.
      weights: how the frozen matrices of the blocks' linear layers are held: "plain", in `dtype`, or "nf4", quantised shard by
        shard as they are read (QLoRA, Dettmers et al., 2023).
      seed: of random weights and fresh adapters.
      note: told, in a sentence, what was left out by name.

    Raises InputError or UnsupportedError, in one line, before anything large is read.
    """
    if trainable not in ("lora", "all"):
        raise InputError(f"trainable is {trainable!r}; wanted 'lora' or 'all'")
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; wanted one of {', '.join(DTYPES)}")
    if memory not in ("device", "host"):
        raise InputError(f"memory is {memory!r}; wanted 'device' or 'host'")
    if trainable == "all" and (adapter or lora):
        raise InputError("an adapter was given with trainable 'all'; wanted either adapters or all parameters to be trained")
    given = read_adapter(adapter) if adapter else None
    lora = None if trainable == "all" else given.config if given else lora or LoraConfig()
    _require_x64(dtype)
    directory = Path(model) if os.path.isdir(model) else None
    spec = spec_of_config(read_config(directory)) if directory else named_spec(str(model))
    files = SafetensorsDirectory(directory) if directory else None
    dtype = _dtype_of(files) if dtype == "auto" else dtype
    built = make_model(spec, mesh, dtype=dtype, lora=lora, sizes=sizes or BlockSizes(), memory=memory, weights=weights)
    policy = random_policy(built, mesh, seed) if files is None else _read_weights(built, mesh, files, seed, note)
    return policy if given is None else with_adapter(policy, given)


def _require_x64(dtype: str) -> None:
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise InputError("dtype float64 was asked for and JAX's 64-bit mode is off; set JAX_ENABLE_X64=1")


def _dtype_of(files: SafetensorsDirectory | None) -> str:
    """Matrices decide: a bfloat16 checkpoint may hold a few float32 vectors (decay rates)."""
    if files is None:
        return "float32"
    wide = all(files.dtypes[name].itemsize >= 4 for name, shape in files.shapes.items() if len(shape) == 2)
    return "float32" if wide else "bfloat16"


def _read_weights(model: Model, mesh: Mesh, files: SafetensorsDirectory, seed: int, note: Callable[[str], None]) -> Policy:
    abstract = model.abstract_parameters()
    wanted = {name: p.entry_shape for p in _base_parameters(abstract)
              for name in parameters.checkpoint_names(p).reshape(-1).tolist()}
    names, ignored = match_names(files.shapes, wanted, model.checkpoint_prefixes, model.checkpoint_ignored)
    if ignored:
        note(f"{len(ignored)} tensors are no part of the text model and were left out: {', '.join(ignored[:3])}"
             + (", .." if len(ignored) > 3 else ""))

    def one(p: Parameter):
        if _is_adapter(p):
            return parameters.first_value(p, mesh, seed)
        stacked = parameters.checkpoint_names(p)
        return parameters.place(p, mesh, lambda stack, index: files.read(names[stacked[stack]], index))

    return Policy(model, mesh, *(parameters.map_parameters(one, tree) for tree in abstract))


def _base_parameters(abstract: tuple[Tree, Tree]) -> list[Parameter]:
    return [p for p in jax.tree.leaves(abstract, is_leaf=parameters.is_parameter) if not _is_adapter(p)]


def _is_adapter(p: Parameter) -> bool:
    return p.name.endswith((".lora_A", ".lora_B"))


def with_adapter(policy: Policy, adapter: PeftAdapter) -> Policy:
    """The policy with a PEFT adapter's matrices. Raises InputError where they are not those of the policy's own targets."""
    wanted = {}
    for p in jax.tree.leaves(policy.model.abstract_parameters()[0], is_leaf=parameters.is_parameter):
        for name in parameters.checkpoint_names(p, "").reshape(-1).tolist():
            wanted[name] = p.shape[p.stack.ndim :]
    found = {f"{module}.lora_{side}": matrix for module, pair in adapter.matrices.items() for side, matrix in zip("AB", pair, strict=True)}
    for name in [*found, *wanted]:
        if name not in wanted:
            raise InputError(f"the adapter holds {name}; the model has no such adapted layer: wanted an adapter of this model")
        if name not in found:
            raise InputError(f"the adapter lacks {name}; wanted its matrices on every layer that has a {target_names([name[:-7]])[0]}")
        if found[name].shape != wanted[name]:
            raise InputError(f"the adapter's {name} is {list(found[name].shape)}; wanted {list(wanted[name])} for this model")

    def one(p: Parameter):
        stacked = parameters.checkpoint_names(p, "")
        return parameters.place(p, policy.mesh, lambda stack, index: found[stacked[stack]][index])

    return dataclasses.replace(
        policy, trainable=parameters.map_parameters(one, policy.model.abstract_parameters()[0]), origin=Policy.new_origin(), step=0)


def to_adapter(policy: Policy, *, prefix: str = TEXT_PREFIX, base_model: str | None = None) -> PeftAdapter:
    """The policy's adapter as PEFT names it. Only the adapter leaves its devices."""
    if policy.model.lora is None:
        raise InputError("the policy has no adapter (all parameters are trained); wanted trainable 'lora'")
    named = parameters.to_host(policy.trainable, policy.model.abstract_parameters()[0])
    modules = [name.removesuffix(".lora_A") for name in named if name.endswith(".lora_A")]
    matrices = {m.removeprefix("model."): (named[m + ".lora_A"], named[m + ".lora_B"]) for m in modules}
    config = dataclasses.replace(policy.model.lora, targets=target_names(matrices))
    return PeftAdapter(config, matrices, prefix, base_model)


def save_adapter(policy: Policy, directory: str | os.PathLike, *, prefix: str = TEXT_PREFIX, base_model: str | None = None) -> None:
    """Writes the policy's adapter as a PEFT directory; see `models.adapters.write_adapter`."""
    write_adapter(directory, to_adapter(policy, prefix=prefix, base_model=base_model))


def to_weights(policy: Policy) -> dict[str, np.ndarray]:
    """All parameters by checkpoint name, whole, on the host: for small models and their references."""
    trainable, frozen = policy.model.abstract_parameters()
    return parameters.to_host(policy.trainable, trainable) | parameters.to_host(policy.frozen, frozen)
