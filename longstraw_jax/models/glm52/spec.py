"""GLM-5.2 as numbers: the published size, a tiny one, and the reading of a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from longstraw_jax.errors import InputError, UnsupportedError

MODEL_TYPES = ("glm_moe_dsa",)
"""`model_type` of GLM-5, 5.1 and 5.2."""

FULL, SHARED = "full", "shared"


def scheduled_types(layers: int, every: int, offset: int) -> tuple[str, ...]:
    """`config.json`'s `index_topk_freq` and `index_skip_topk_offset` as one type a layer (transformers, `GlmMoeDsaConfig`)."""
    return tuple(FULL if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(layers))


@dataclass(frozen=True)
class Glm52Spec:
    """Field names are those of transformers' `GlmMoeDsaConfig`; the defaults are the published GLM-5.2's."""

    vocab_size: int = 154_880
    hidden_size: int = 6_144
    intermediate_size: int = 12_288
    moe_intermediate_size: int = 2_048
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    """Layers, from the first on, with a dense feed-forward part; the others have experts."""
    q_lora_rank: int = 2_048
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    index_topk: int = 2_048
    index_n_heads: int = 32
    index_head_dim: int = 128
    indexer_types: tuple[str, ...] = scheduled_types(78, every=4, offset=3)
    """Per layer: "full" selects by its own indexer, "shared" takes the selection of the last full layer before it."""
    rms_norm_eps: float = 1e-5
    q_a_norm_eps: float = 1e-6
    """Of the two latents' norms. transformers leaves them at the class's default, whatever rms_norm_eps says."""
    kv_a_norm_eps: float = 1e-6
    index_k_norm_eps: float = 1e-6
    rope_theta: float = 8e6
    max_position_embeddings: int = 1_048_576

    def __post_init__(self):
        for f in fields(self):
            least = "a number >= 0" if f.name == "first_k_dense_replace" else "a number > 0"
            value = getattr(self, f.name)
            if f.name != "indexer_types" and (value < 0 or value == 0 and least.endswith("> 0")):
                raise InputError(f"config field {f.name} is {value}; wanted {least}")
        for part, whole in (("first_k_dense_replace", "num_hidden_layers"), ("num_experts_per_tok", "n_routed_experts"),
                            ("qk_rope_head_dim", "index_head_dim")):
            if getattr(self, part) > getattr(self, whole):
                raise InputError(f"config field {part}={getattr(self, part)} exceeds {whole}={getattr(self, whole)}; wanted at most that")
        if self.qk_rope_head_dim % 2:
            raise InputError(f"config field qk_rope_head_dim is {self.qk_rope_head_dim}; wanted an even number")
        self._check_indexers()

    def _check_indexers(self) -> None:
        kinds, layers = self.indexer_types, self.num_hidden_layers
        if len(kinds) != layers:
            raise InputError(f"config field indexer_types has {len(kinds)} entries for num_hidden_layers={layers}; wanted one a layer")
        bad = next((i for i, kind in enumerate(kinds) if kind not in (FULL, SHARED)), None)
        if bad is not None:
            raise InputError(f"config field indexer_types[{bad}] is {kinds[bad]!r}; wanted {FULL!r} or {SHARED!r}")
        if kinds[0] != FULL:
            raise InputError("config field indexer_types[0] is 'shared', with no layer before it to share; wanted 'full'")

    def first_layers(self, count: int) -> Glm52Spec:
        """The same model cut off after its first layers."""
        return replace(self, num_hidden_layers=count, indexer_types=self.indexer_types[:count])

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """What attention keeps of a token: the latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that have an indexer."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == FULL)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))


SPECS = {
    "glm5.2": Glm52Spec(),
    # 16 heads in the indexer: with fewer, scores are often exactly 0 for several positions, and what is selected hangs on ties
    "glm5.2-tiny": Glm52Spec(
        vocab_size=256, hidden_size=96, intermediate_size=176, moe_intermediate_size=40, num_hidden_layers=8, num_attention_heads=6,
        n_routed_experts=16, num_experts_per_tok=4, first_k_dense_replace=2, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=24,
        qk_rope_head_dim=8, v_head_dim=20, index_topk=32, index_n_heads=16, index_head_dim=28,
        indexer_types=scheduled_types(8, every=4, offset=3),
    ),
}

_NOT_IN_TRANSFORMERS = ("q_a_norm_eps", "kv_a_norm_eps", "index_k_norm_eps")
_SUPPORTED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "tie_word_embeddings": False,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "rope_interleave": True, "indexer_rope_interleave": True,
}
"""The fields that change the arithmetic and have one supported value, that of the published model."""


def spec_from_hf(config: dict) -> Glm52Spec:
    """Reads a `config.json`. Raises on a missing field or an architecture that differs. `head_dim` means nothing and is not read."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = {f.name: config.get(f.name) for f in fields(Glm52Spec) if f.name != "indexer_types"}
    values |= {name: 1e-6 for name in _NOT_IN_TRANSFORMERS if values[name] is None}
    values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
    values["first_k_dense_replace"] = _dense_layers(config)
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise InputError(f"config.json lacks {', '.join(missing)}; wanted every field of the GLM-5.2 configuration")
    _refuse_differences(config, rope)
    for f in fields(Glm52Spec):
        wanted, kind = ((int,), "a whole number") if f.type == "int" else ((int, float), "a number")
        if f.name in values and (not isinstance(values[f.name], wanted) or isinstance(values[f.name], bool)):
            raise InputError(f"config.json field {f.name} is {values[f.name]!r}; wanted {kind}")
    return Glm52Spec(**values, indexer_types=_indexer_types(config))


def spec_to_hf(spec: Glm52Spec) -> dict:
    """The inverse of `spec_from_hf`: the fields of a `config.json`."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    values["indexer_types"] = list(spec.indexer_types)
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    sparse = spec.num_hidden_layers - spec.first_k_dense_replace
    return {"model_type": MODEL_TYPES[0], **values, "num_key_value_heads": spec.num_attention_heads, "rope_parameters": rope,
            "mlp_layer_types": ["dense"] * spec.first_k_dense_replace + ["sparse"] * sparse,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "tie_word_embeddings": False}


def _dense_layers(config: dict) -> int | None:
    """How many layers are dense, from `mlp_layer_types` where it is given (it decides in transformers), else from its field."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return config.get("first_k_dense_replace")
    if len(kinds) != config.get("num_hidden_layers"):
        raise InputError(f"config.json has {len(kinds)} mlp_layer_types for num_hidden_layers={config.get('num_hidden_layers')}")
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise UnsupportedError(f"config.json mlp_layer_types is {kinds}; this version supports 'dense' layers followed by 'sparse' ones")
    return dense


def _indexer_types(config: dict) -> tuple[str, ...]:
    """The explicit list, else the pattern, else the schedule: transformers' order."""
    given, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if given is not None:
        return tuple(given)
    if pattern is not None:
        return tuple({"F": FULL, "S": SHARED}.get(kind, kind) for kind in pattern)
    every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset")
    if every > 1 and offset is None:
        # transformers takes 2 here, which gives as many full layers as the published 3, but others
        raise InputError(f"config.json has index_topk_freq={every} without index_skip_topk_offset; wanted both, or indexer_types")
    return scheduled_types(config["num_hidden_layers"], every, offset or 0)


def _refuse_differences(config: dict, rope: dict) -> None:
    for name, value in _SUPPORTED.items():
        if config.get(name) is not None and config[name] != value:
            raise UnsupportedError(f"config.json field {name} is {config[name]!r}; this version supports {value!r} only")
    for name, of in (("num_key_value_heads", "num_attention_heads"), ("num_experts", "n_routed_experts")):
        if config.get(name) is not None and config[name] != config[of]:
            raise UnsupportedError(f"config.json has {name}={config[name]!r} beside {of}={config[of]!r}; this version supports equal "
                                   "numbers only")
    others = {*(config.get("layer_types") or ())} - {"indexed_attention", "deepseek_sparse_attention"}
    if others:
        raise UnsupportedError(f"config.json layer_types has {', '.join(map(repr, sorted(others)))}; this version supports "
                               "'indexed_attention' only")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"config.json rope_type is {kind!r}; this version supports 'default' only")
