"""The plain Qwen3.6 against transformers on tiny checkpoints: logits, log-probs, loss and every parameter's gradient."""

import functools
import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from longstraw_jax.errors import InputError
from longstraw_jax.models.qwen36 import reference
from longstraw_jax.models.qwen36.spec import Qwen36Spec, spec_from_hf

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch_reference  # noqa: E402
from longstraw_jax.conventional import pytorch  # noqa: E402

# transformers cuts the delta rule into chunks of 64 tokens: the prompt is shorter than one, a response longer.
PROMPT, RESPONSE, GROUP = 43, 70, 2
CONVENTIONAL, DETACHED = 0, PROMPT - 1
# Nearly all the time here goes into compiling, each program for one run.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
OBJECTIVE = dict(clip_low=0.2, clip_high=0.25, kl_beta=0.1)


@dataclass(frozen=True)
class Checkpoint:
    model: torch.nn.Module
    weights: dict
    spec: Qwen36Spec


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
    model = torch_reference.build_tiny_qwen(directory, **overrides)
    weights = {name: jnp.asarray(value) for name, value in load_file(directory / "model.safetensors").items()}
    return Checkpoint(model, weights, spec_from_hf(json.loads((directory / "config.json").read_text())))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Checkpoint:
    # Every second layer attends, so that gradients cross both kinds of layer in each order at half the compile time.
    return build(tmp_path_factory.mktemp("tiny"), num_hidden_layers=4, full_attention_interval=2)


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


def ours(tiny: Checkpoint, group: Group, stop: int):
    """Loss, log-probs [G, R] and gradients by the oracle, with the objective written out once more."""
    ids = jnp.concatenate([np.tile(group.prompt, (GROUP, 1)), group.responses], axis=1)

    def loss(weights):
        score = functools.partial(reference.logprobs, weights, spec=tiny.spec, stop=stop)
        new = jax.vmap(score)(ids)[:, PROMPT - 1 :]
        ratio, advantage = jnp.exp(new - group.old), group.advantages[:, None]
        clipped = jnp.clip(ratio, 1 - OBJECTIVE["clip_low"], 1 + OBJECTIVE["clip_high"])
        divergence = jnp.exp(group.ref - new) - (group.ref - new) - 1
        per_token = OBJECTIVE["kl_beta"] * divergence - jnp.minimum(ratio * advantage, clipped * advantage)
        return jnp.mean((per_token * group.masks).sum(1) / group.masks.sum(1)), new

    (value, new), gradients = jit(jax.value_and_grad(loss, has_aux=True))(tiny.weights)
    return float(value), np.asarray(new), {name: np.asarray(g) for name, g in gradients.items()}


def theirs(tiny: Checkpoint, group: Group, stop: int):
    tiny.model.zero_grad()
    value, new = pytorch.response_step(
        tiny.model, group.prompt, group.responses, group.advantages.tolist(), group.masks, detach_prompt=stop > 0,
        old_logprobs=group.old, ref_logprobs=group.ref, **OBJECTIVE,
    )
    return value, np.stack(new), {name: p.grad.numpy().copy() for name, p in tiny.model.named_parameters()}


@pytest.fixture(scope="module")
def steps(tiny, group):
    return {stop: (ours(tiny, group, stop), theirs(tiny, group, stop)) for stop in (CONVENTIONAL, DETACHED)}


def relative_l2(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("overrides", [{}, {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 4}])
def test_logits(tmp_path, overrides):
    case = build(tmp_path, seed=3, **overrides)
    ids = np.random.default_rng(2).integers(0, case.spec.vocab_size, 100)
    with torch.no_grad():
        wanted = case.model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0].numpy()
    given = jit(reference.logits, static_argnames="spec")(case.weights, jnp.asarray(ids), case.spec)
    np.testing.assert_allclose(given, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("stop", [CONVENTIONAL, DETACHED])
def test_loss_and_logprobs(steps, stop):
    (loss, new, _), (wanted_loss, wanted, _) = steps[stop]
    assert loss == pytest.approx(wanted_loss, abs=1e-5)
    np.testing.assert_allclose(new, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("stop", [CONVENTIONAL, DETACHED])
def test_gradients(steps, stop):
    (*_, given), (*_, wanted) = steps[stop]
    assert given.keys() == wanted.keys()
    errors = {name: relative_l2(given[name], wanted[name]) for name in wanted}
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-3, f"{worst}: relative L2 {errors[worst]:.1e}"


def test_stop_changes_only_what_reaches_the_state(steps, tiny):
    full, response = (steps[stop][0][2] for stop in (CONVENTIONAL, DETACHED))
    last = f"model.layers.{tiny.spec.num_hidden_layers - 1}"
    stateless = ["lm_head", "model.norm", f"{last}.post_attention_layernorm", f"{last}.mlp.gate_proj", f"{last}.mlp.up_proj",
                 f"{last}.mlp.down_proj", f"{last}.self_attn.q_proj", f"{last}.self_attn.q_norm", f"{last}.self_attn.o_proj"]
    for name in full:
        change = relative_l2(response[name], full[name])
        if name.removesuffix(".weight") in stateless:
            assert change < 1e-5, name
        else:
            assert change > 1e-2, name


def test_one_token_responses_and_one_token_prompts(tiny):
    # transformers scores the first by its single-token rule, and the second without a prompt state.
    ids = np.random.default_rng(4).integers(0, tiny.spec.vocab_size, 8)
    wanted = jit(reference.logprobs, static_argnames="spec")(tiny.weights, jnp.asarray(ids), tiny.spec)
    for length in (7, 1):
        gradients = []
        for detach in (False, True):
            tiny.model.zero_grad()
            _, new = pytorch.response_step(tiny.model, ids[:length], [ids[length:]], [1.0], detach_prompt=detach)
            gradients.append(tiny.model.lm_head.weight.grad.numpy().copy())
            np.testing.assert_allclose(new[0], wanted[length - 1 :], atol=2e-4, rtol=0)
        assert relative_l2(*gradients) < 1e-5


def test_gradient_is_the_slope_in_float64(tmp_path, x64):
    tiny = build(tmp_path, num_hidden_layers=2, full_attention_interval=2)
    rng = np.random.default_rng(5)
    weights = {name: np.asarray(w, np.float64) for name, w in tiny.weights.items()}
    direction = {name: rng.normal(size=w.shape) * w.std() for name, w in weights.items()}
    ids = jnp.asarray(rng.integers(0, tiny.spec.vocab_size, 24))

    @jit
    @jax.value_and_grad
    def step(weights):
        return reference.logprobs(weights, ids, tiny.spec)[12:].mean()

    def loss(distance):
        return float(step({name: w + distance * direction[name] for name, w in weights.items()})[0])

    _, gradient = step(weights)
    assert gradient["model.layers.0.linear_attn.A_log"].dtype == jnp.float64
    slope = sum(np.vdot(gradient[name], direction[name]) for name in weights)
    assert (loss(5e-7) - loss(-5e-7)) / 1e-6 == pytest.approx(slope, rel=1e-7)


def test_adapters_equal_merged_weights(tiny):
    rng = np.random.default_rng(6)
    ids = jnp.asarray(rng.integers(0, tiny.spec.vocab_size, 20))
    adapters, merged = {}, dict(tiny.weights)
    for name in ("layers.0.linear_attn.in_proj_qkv", "layers.1.self_attn.q_proj", "layers.3.mlp.down_proj"):
        rows, columns = tiny.weights[f"model.{name}.weight"].shape
        down, up = jnp.asarray(rng.normal(size=(4, columns)) * 0.1, "f"), jnp.asarray(rng.normal(size=(rows, 4)) * 0.1, "f")
        adapters[name] = (down, up)
        merged[f"model.{name}.weight"] += 0.5 * up @ down
    score = jit(reference.hidden_states, static_argnames="spec")
    given, wanted = score(tiny.weights, ids, tiny.spec, adapters, 0.5), score(merged, ids, tiny.spec)
    np.testing.assert_allclose(given, wanted, atol=2e-4, rtol=0)
    assert relative_l2(given, score(tiny.weights, ids, tiny.spec)) > 1e-2


def test_l2_norm_of_small_vectors():
    # With larger vectors the place and size of this epsilon do not show.
    from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm

    x = np.float32(np.random.default_rng(7).normal(size=(5, 16)) * 3e-4)
    np.testing.assert_allclose(reference._l2_norm(jnp.asarray(x)), l2norm(torch.as_tensor(x)).numpy(), rtol=1e-5)


def test_refuses_what_it_would_ignore(tiny):
    ids = jnp.arange(4)
    adapter = jnp.zeros((1, tiny.spec.hidden_size)), jnp.zeros((tiny.spec.hidden_size, 1))
    with pytest.raises(InputError, match=r"'layers\.0\.self_attn\.q_proj'"):  # the first layer is recurrent
        reference.logits(tiny.weights, ids, tiny.spec, {"layers.0.self_attn.q_proj": adapter}, 1.0)
    with pytest.raises(InputError, match="stop is 5"):
        reference.logits(tiny.weights, ids, tiny.spec, stop=5)
