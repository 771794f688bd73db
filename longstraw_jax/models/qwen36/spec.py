"""Qwen3.6's text model as numbers: the published size, a tiny one, and the reading of a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from longstraw_jax.errors import InputError, UnsupportedError

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
"""`model_type` of the published multimodal composite and of its text part; 3.6 uses the 3.5 code."""


@dataclass(frozen=True)
class Qwen36Spec:
    """Field names are those of transformers' `Qwen3_5TextConfig`; the defaults are the published 27B's."""

    vocab_size: int = 248_320
    hidden_size: int = 5_120
    intermediate_size: int = 17_408
    num_hidden_layers: int = 64
    num_attention_heads: int = 24
    num_key_value_heads: int = 4
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 48
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 262_144

    def __post_init__(self):
        for f in fields(self):
            if getattr(self, f.name) <= 0:
                raise InputError(f"config field {f.name} is {getattr(self, f.name)}; wanted a number > 0")
        for whole, part in (("num_hidden_layers", "full_attention_interval"), ("num_attention_heads", "num_key_value_heads"),
                            ("linear_num_value_heads", "linear_num_key_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise InputError(f"config field {whole}={getattr(self, whole)} is no multiple of {part}={getattr(self, part)}")
        if self.full_attention_interval < 2:
            raise UnsupportedError("full_attention_interval is 1, a model without Gated DeltaNet layers; wanted >= 2")
        if self.rotary_dim % 2:
            raise InputError(f"head_dim x partial_rotary_factor = {self.rotary_dim} rotary dimensions; wanted an even number")

    def first_layers(self, count: int) -> Qwen36Spec:
        """The same model cut off after its first layers, whole periods of them."""
        return replace(self, num_hidden_layers=count)

    @property
    def periods(self) -> int:
        return self.num_hidden_layers // self.full_attention_interval

    @property
    def recurrent_per_period(self) -> int:
        return self.full_attention_interval - 1

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def conv_channels(self) -> int:
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.linear_num_value_heads * self.linear_value_head_dim


SPECS = {
    "qwen3.6-27b": Qwen36Spec(),
    "qwen3.6-tiny": Qwen36Spec(
        vocab_size=256, hidden_size=96, intermediate_size=192, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=8, linear_num_value_heads=24, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=1_048_576,
    ),
}


def spec_from_hf(config: dict) -> Qwen36Spec:
    """Reads a `config.json`, the composite's or the text model's. Raises on a missing field or an architecture that differs."""
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    values = {**text, "rope_theta": rope.get("rope_theta", text.get("rope_theta")),
              "partial_rotary_factor": rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))}
    values["full_attention_interval"] = _interval(text)
    missing = [f.name for f in fields(Qwen36Spec) if values.get(f.name) is None]
    if missing:
        raise InputError(f"config.json lacks {', '.join(missing)}; wanted every field of the Qwen3.6 text configuration")
    _refuse_differences(text, rope)
    for f in fields(Qwen36Spec):
        wanted = (int,) if f.type == "int" else (int, float)
        if not isinstance(values[f.name], wanted) or isinstance(values[f.name], bool):
            kind = "a whole number" if f.type == "int" else "a number"
            raise InputError(f"config.json field {f.name} is {values[f.name]!r}; wanted {kind}")
    return Qwen36Spec(**{f.name: values[f.name] for f in fields(Qwen36Spec)})


def spec_to_hf(spec: Qwen36Spec) -> dict:
    """The inverse of `spec_from_hf`: the fields of a text model's `config.json`."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    rope = {"rope_type": "default", **{name: values.pop(name) for name in ("rope_theta", "partial_rotary_factor")}}
    pairs = spec.rotary_dim // 2
    # text has one position in all three sections of the rotation, so that how they share the pairs makes no difference
    rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return {"model_type": "qwen3_5_text", **values, "rope_parameters": rope | {"mrope_interleaved": True}, "tie_word_embeddings": False}


def _interval(text: dict) -> int | None:
    """The interval of full attention, from `layer_types` where it is given (it decides in transformers), else from its field."""
    kinds = text.get("layer_types")
    if not kinds:
        return text.get("full_attention_interval", 4)
    if len(kinds) != text.get("num_hidden_layers"):
        raise InputError(f"config.json has {len(kinds)} layer_types for num_hidden_layers={text.get('num_hidden_layers')}")
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    wanted = ["full_attention" if interval and (i + 1) % interval == 0 else "linear_attention" for i in range(len(kinds))]
    if not interval or kinds != wanted:
        raise UnsupportedError(f"config.json layer_types {kinds} are not periodic; wanted linear_attention layers "
                               "closed by a full_attention layer, repeated")
    return interval


def _refuse_differences(text: dict, rope: dict) -> None:
    """The fields that change the arithmetic and have one supported value."""
    supported = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "attn_output_gate": True,
                 "output_gate_type": "swish", "attention_dropout": 0}
    for name, value in supported.items():
        if text.get(name, value) not in (value, float(value) if isinstance(value, int) else value):
            raise UnsupportedError(f"config.json field {name} is {text[name]!r}; this version supports {value!r} only")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"config.json rope_type is {kind!r}; this version supports 'default' only")
