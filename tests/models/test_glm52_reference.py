"""The plain GLM-5.2 against transformers on tiny checkpoints: choices, logits, log-probs, loss and every parameter's gradient."""

import dataclasses
import functools
import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from longstraw_jax.errors import InputError
from longstraw_jax.models.glm52 import reference
from longstraw_jax.models.glm52.spec import SPECS, Glm52Spec, spec_from_hf, spec_to_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import torch_reference  # noqa: E402
from longstraw_jax.conventional import pytorch  # noqa: E402

# Both several times as long as the tiny model's index_topk of 12: most tokens of either see a selection.
PROMPT, RESPONSE, GROUP = 37, 26, 2
CONVENTIONAL, DETACHED = 0, PROMPT - 1
TOKENS = PROMPT + RESPONSE
# Nearly all the time here goes into compiling, each program for one run.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
trace = jit(reference.trace, static_argnames="spec")
OBJECTIVE = dict(clip_low=0.2, clip_high=0.25, kl_beta=0.1)


@dataclass(frozen=True)
class Checkpoint:
    model: torch.nn.Module
    weights: dict
    spec: Glm52Spec


@dataclass(frozen=True)
class Group:
    """A prompt [P], G responses [G, R], and what the objective takes beside them, [G] or [G, R]."""

    prompt: np.ndarray
    responses: np.ndarray
    advantages: np.ndarray
    masks: np.ndarray
    old: np.ndarray
    ref: np.ndarray


def build(directory, **overrides) -> Checkpoint:
    model = torch_reference.build_tiny_glm(directory, **overrides)
    weights = {name: jnp.asarray(value) for name, value in load_file(directory / "model.safetensors").items()}
    return Checkpoint(model, weights, spec_from_hf(json.loads((directory / "config.json").read_text())))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Checkpoint:
    # Every pairing of the published layers in few of them: compiling is what this file costs.
    return build(tmp_path_factory.mktemp("tiny"), num_hidden_layers=4, first_k_dense_replace=1,
                 indexer_types=["full", "full", "shared", "full"])


@pytest.fixture(scope="module")
def ids(tiny):
    return jnp.asarray(np.random.default_rng(2).integers(0, tiny.spec.vocab_size, TOKENS))


@pytest.fixture(scope="module")
def ours(tiny, ids) -> reference.Trace:
    return trace(tiny.weights, ids, tiny.spec)


def run(model, ids):
    """transformers' (logits [T, V], what each indexer chose [T, index_topk], whom each router chose [T, K]), by layer."""
    chosen, hooks = {"indexer": {}, "gate": {}}, []
    for i, layer in enumerate(model.model.layers):
        for module, kind in ((layer.self_attn.indexer, "indexer"), (getattr(layer.mlp, "gate", None), "gate")):
            def keep(_, __, out, kind=kind, i=i):
                chosen[kind][i] = (out[0] if kind == "indexer" else out[2]).numpy()

            if module is not None:
                hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(np.asarray(ids))[None], use_cache=False).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, chosen["indexer"], chosen["gate"]


@pytest.fixture(scope="module")
def theirs(tiny, ids):
    return run(tiny.model, ids)


def mask_of(chosen) -> np.ndarray:
    """What is attended to: the chosen positions, as far as they are not in the future."""
    mask = np.zeros((len(chosen), len(chosen)), bool)
    np.put_along_axis(mask, chosen.astype(np.int64), True, axis=1)
    return np.tril(mask)


def relative_l2(a, b) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))  # of two zeros: 0


def test_names_and_shapes(tiny):
    assert {name: weight.shape for name, weight in tiny.weights.items()} == reference.parameter_shapes(tiny.spec)


def test_published_size():
    spec = SPECS["glm5.2"]
    count = sum(np.prod(shape, dtype=np.int64) for shape in reference.parameter_shapes(spec).values())
    config = transformers.AutoConfig.for_model(**spec_to_hf(spec))
    with torch.device("meta"):
        published = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    assert count == sum(x.numel() for x in published.values()) == 743_377_019_904


def test_selection_and_routing(tiny, ours, theirs):
    _, chosen, routed = theirs
    assert ours.selected.keys() == chosen.keys() == {0, 1, 3} and ours.routed.keys() == routed.keys() == {1, 2, 3}
    for layer, positions in chosen.items():
        np.testing.assert_array_equal(ours.selected[layer], mask_of(positions), f"layer {layer}")
        np.testing.assert_array_equal(ours.selected[layer].sum(1), np.minimum(np.arange(TOKENS) + 1, tiny.spec.index_topk))
    for layer, experts in routed.items():
        np.testing.assert_array_equal(np.sort(ours.routed[layer]), np.sort(experts), f"layer {layer}")
    assert len({np.asarray(mask).tobytes() for mask in ours.selected.values()}) == 3


def test_logits(tiny, ours, theirs):
    given = ours.hidden @ tiny.weights["lm_head.weight"].T
    np.testing.assert_allclose(given, theirs[0], atol=3e-5, rtol=0)


def test_other_sizes(tmp_path):
    case = build(tmp_path, seed=3, num_hidden_layers=2, first_k_dense_replace=0, indexer_types=["full", "shared"], index_topk=5,
                 n_shared_experts=2, routed_scaling_factor=1.5, num_attention_heads=4, num_key_value_heads=4, qk_rope_head_dim=12)
    ids = np.random.default_rng(3).integers(0, case.spec.vocab_size, 50)
    given = jit(reference.logits, static_argnames="spec")(case.weights, jnp.asarray(ids), case.spec)
    np.testing.assert_allclose(given, run(torch_reference.load_torch(tmp_path), ids)[0], atol=3e-5, rtol=0)


def test_a_selection_of_everything_is_dense_attention(tiny, ids, ours):
    whole = dataclasses.replace(tiny.spec, index_topk=TOKENS)
    # with other indexers: what they say makes no difference then
    weights = {name: w * (1 - 2 * (".indexer." in name)) for name, w in tiny.weights.items()}
    given = trace(weights, ids, whole)
    for mask in given.selected.values():
        np.testing.assert_array_equal(mask, np.tril(np.ones((TOKENS, TOKENS), bool)))
    indexers = [layer.self_attn.indexer for layer in tiny.model.model.layers if layer.self_attn.indexer is not None]
    for indexer in indexers:
        indexer.index_topk = TOKENS
    try:
        wanted, *_ = run(tiny.model, ids)
    finally:
        for indexer in indexers:
            indexer.index_topk = tiny.spec.index_topk
    np.testing.assert_allclose(given.hidden @ tiny.weights["lm_head.weight"].T, wanted, atol=3e-5, rtol=0)
    few = tiny.spec.index_topk
    np.testing.assert_allclose(given.hidden[:few], ours.hidden[:few], atol=1e-5, rtol=0)
    assert relative_l2(given.hidden[few:], ours.hidden[few:]) > 0.1


def test_ties_go_to_the_lowest_position():
    scores = jnp.asarray([[9, 9, 9, 9], [0.0, -0.0, 9, 9], [-1, -0.0, 0.0, 9], [2, 5, 2, 2]])
    np.testing.assert_array_equal(reference.select(scores, 1), np.bool_([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]))
    np.testing.assert_array_equal(reference.select(scores, 2), np.bool_([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]]))
    np.testing.assert_array_equal(reference.select(scores, 9), np.tril(np.ones((4, 4), bool)))


@pytest.fixture(scope="module")
def group(tiny) -> Group:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, tiny.spec.vocab_size, PROMPT)
    responses = rng.integers(0, tiny.spec.vocab_size, (GROUP, RESPONSE))
    masks = np.float32(rng.random((GROUP, RESPONSE)) < 0.8)
    _, now = pytorch.response_step(tiny.model, prompt, responses, [0.0] * GROUP, detach_prompt=False)
    # Far enough from the policy for ratios to be clipped on either side.
    old, ref = (np.float32(np.stack(now) + rng.normal(0, 0.3, responses.shape)) for _ in range(2))
    return Group(prompt, responses, np.float32([1.0, -0.7]), masks, old, ref)


def our_steps(tiny: Checkpoint, group: Group, stops):
    """By stop: loss, log-probs [G, R] and gradients by the oracle, with the objective written out once more."""
    ids = jnp.concatenate([np.tile(group.prompt, (GROUP, 1)), group.responses], axis=1)

    def loss(weights, stop):
        score = functools.partial(reference.logprobs, weights, spec=tiny.spec, stop=stop)
        new = jax.vmap(score)(ids)[:, PROMPT - 1 :]
        ratio, advantage = jnp.exp(new - group.old), group.advantages[:, None]
        clipped = jnp.clip(ratio, 1 - OBJECTIVE["clip_low"], 1 + OBJECTIVE["clip_high"])
        divergence = jnp.exp(group.ref - new) - (group.ref - new) - 1
        per_token = OBJECTIVE["kl_beta"] * divergence - jnp.minimum(ratio * advantage, clipped * advantage)
        return jnp.mean((per_token * group.masks).sum(1) / group.masks.sum(1)), new

    step = jit(jax.value_and_grad(loss, has_aux=True))
    for stop in stops:
        (value, new), gradients = step(tiny.weights, stop)
        yield stop, (float(value), np.asarray(new), {name: np.asarray(g) for name, g in gradients.items()})


def their_step(tiny: Checkpoint, group: Group, stop: int):
    """The same by PyTorch, with gradients by the names on disk; none for the indexers."""
    tiny.model.zero_grad()
    value, new = pytorch.response_step(
        tiny.model, group.prompt, group.responses, group.advantages.tolist(), group.masks, detach_prompt=stop > 0,
        old_logprobs=group.old, ref_logprobs=group.ref, **OBJECTIVE,
    )
    gradients = {}
    for name, p in tiny.model.named_parameters():
        if p.grad is not None:
            gradients |= on_disk(name, p.grad.numpy().copy())
    return value, np.stack(new), gradients


def on_disk(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter under its name on disk, where the experts lie one by one, gate and up apart."""
    layer, _, part = name.partition("experts.")
    if part == "gate_up_proj":
        halves = zip(("gate_proj", "up_proj"), np.split(value, 2, axis=1), strict=True)
        return {f"{layer}experts.{e}.{part}.weight": x for part, half in halves for e, x in enumerate(half)}
    if part == "down_proj":
        return {f"{layer}experts.{e}.{part}.weight": x for e, x in enumerate(value)}
    return {name: value}


@pytest.fixture(scope="module")
def steps(tiny, group):
    return {stop: (step, their_step(tiny, group, stop)) for stop, step in our_steps(tiny, group, (CONVENTIONAL, DETACHED))}


@pytest.mark.parametrize("stop", [CONVENTIONAL, DETACHED])
def test_loss_and_logprobs(steps, stop):
    (loss, new, _), (wanted_loss, wanted, _) = steps[stop]
    assert loss == pytest.approx(wanted_loss, abs=3e-6)
    np.testing.assert_allclose(new, wanted, atol=3e-5, rtol=0)


def chosen_for(name: str) -> bool:
    """Whether a tensor only takes part in choices, which have no derivative."""
    return ".indexer." in name or name.endswith("e_score_correction_bias")


@pytest.mark.parametrize("stop", [CONVENTIONAL, DETACHED])
def test_gradients(steps, stop):
    (*_, given), (*_, wanted) = steps[stop]
    assert wanted.keys() == {name for name in given if not chosen_for(name)}
    errors = {name: relative_l2(given[name], wanted[name]) for name in wanted}
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-3, f"{worst}: relative L2 {errors[worst]:.1e}"
    for name in given.keys() - wanted.keys():
        np.testing.assert_array_equal(given[name], 0, name)


def test_stop_changes_only_what_reaches_the_state(steps, tiny):
    full, response = (steps[stop][0][2] for stop in (CONVENTIONAL, DETACHED))
    last = f"model.layers.{tiny.spec.num_hidden_layers - 1}."
    # latents of the prompt are held fixed, and the keys and values that kv_b_proj makes of them are not
    reaching = ("input_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    for name in full:
        if chosen_for(name) or not full[name].any():  # an expert may get no token
            continue
        change = relative_l2(response[name], full[name])
        stateless = name.startswith(("lm_head", "model.norm", last)) and not any(part in name for part in reaching)
        if stateless or ".mlp.experts." not in name:  # an expert of no prompt token has nothing to lose
            assert change < 1e-5 if stateless else change > 1e-2, name


def test_one_token_responses_and_one_token_prompts(tiny, ids, ours):
    scores = jax.nn.log_softmax(ours.hidden @ tiny.weights["lm_head.weight"].T)
    wanted = scores[jnp.arange(TOKENS - 1), ids[1:]]
    for length in (TOKENS - 1, 1):
        gradients = []
        for detach in (False, True):
            tiny.model.zero_grad()
            _, new = pytorch.response_step(tiny.model, ids[:length], [ids[length:]], [1.0], detach_prompt=detach)
            gradients.append(tiny.model.lm_head.weight.grad.numpy().copy())
            np.testing.assert_allclose(new[0], wanted[length - 1 :], atol=3e-5, rtol=0)
        assert relative_l2(*gradients) < 1e-5


def test_gradient_is_the_slope_in_float64(tmp_path, x64):
    tiny = build(tmp_path, num_hidden_layers=2, first_k_dense_replace=1, indexer_types=["full", "shared"], index_topk=6)
    rng = np.random.default_rng(5)
    weights = {name: np.asarray(w, np.float64) for name, w in tiny.weights.items()}
    direction = {name: rng.normal(size=w.shape) * w.std() for name, w in weights.items()}
    ids = jnp.asarray(rng.integers(0, tiny.spec.vocab_size, 24))

    @jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def step(weights):
        run = reference.trace(weights, ids, tiny.spec)
        scores = jax.nn.log_softmax(run.hidden @ weights["lm_head.weight"].T)
        return scores[jnp.arange(12, 23), ids[13:]].mean(), (run.selected, run.routed)

    def at(distance):
        (loss, choices), _ = step({name: w + distance * direction[name] for name, w in weights.items()})
        return float(loss), choices

    (loss, choices), gradient = step(weights)
    assert loss.dtype == gradient["model.layers.1.mlp.gate.weight"].dtype == jnp.float64
    (above, choices_above), (below, choices_below) = at(5e-7), at(-5e-7)
    jax.tree.map(np.testing.assert_array_equal, (choices_above, choices_below), (choices, choices))
    slope = sum(np.vdot(gradient[name], direction[name]) for name in weights)
    assert (above - below) / 1e-6 == pytest.approx(slope, rel=1e-7)


def test_adapters_equal_merged_weights(tiny, ids, ours):
    rng = np.random.default_rng(6)
    adapters, merged = {}, dict(tiny.weights)
    modules = [f"layers.1.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
    modules += [f"layers.1.self_attn.indexer.{name}" for name in ("wq_b", "wk", "weights_proj")]
    modules += ["layers.0.mlp.down_proj", "layers.2.mlp.shared_experts.up_proj", "layers.3.mlp.experts.7.down_proj"]
    modules += [f"layers.2.mlp.experts.{e}.{part}_proj" for e in range(10) for part in ("gate", "up")]
    for name in modules:
        weight = tiny.weights[f"model.{name}.weight"]
        down, up = (jnp.asarray(rng.normal(size=shape), "f") for shape in ((4, weight.shape[1]), (weight.shape[0], 4)))
        adapters[name] = (down * weight.std(), up * 0.4)
        merged[f"model.{name}.weight"] = weight + 0.5 * adapters[name][1] @ adapters[name][0]
    given, wanted = trace(tiny.weights, ids, tiny.spec, adapters, 0.5), trace(merged, ids, tiny.spec)
    jax.tree.map(np.testing.assert_array_equal, given[1:], wanted[1:])
    np.testing.assert_allclose(given.hidden, wanted.hidden, atol=3e-5, rtol=0)
    for name in modules[:12]:  # each of them matters
        alone = {other: pair if other == name else jax.tree.map(jnp.zeros_like, pair) for other, pair in adapters.items()}
        assert relative_l2(trace(tiny.weights, ids, tiny.spec, alone, 0.5).hidden, ours.hidden) > 1e-3, name


def test_refuses_what_it_would_ignore(tiny):
    ids = jnp.arange(4)
    adapter = jnp.zeros((1, tiny.spec.hidden_size)), jnp.zeros((tiny.spec.hidden_size, 1))
    # a dense layer has no experts, a shared layer no indexer; the router and the norms take no adapter
    for name in ("layers.0.mlp.experts.0.up_proj", "layers.2.self_attn.indexer.wk", "layers.2.mlp.gate", "layers.2.input_layernorm"):
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            reference.logits(tiny.weights, ids, tiny.spec, {name: adapter}, 1.0)
    with pytest.raises(InputError, match="stop is 5"):
        reference.logits(tiny.weights, ids, tiny.spec, stop=5)
