"""Capture, scoring, replay and sweep against conventional autodiff over whole sequences, in float64."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

import engine_case as case
from longstraw_jax.capture import capture
from longstraw_jax.config import NORMALISATIONS, BlockSizes, ObjectiveConfig, OptimizerConfig
from longstraw_jax.errors import InputError
from longstraw_jax.kernels_pallas import implementation
from longstraw_jax.loading import to_weights
from longstraw_jax.members import bucket, members_program
from longstraw_jax.models.layers import paged_attention
from longstraw_jax.replay import replay
from longstraw_jax.score import score
from longstraw_jax.sweep import sweep
from longstraw_jax.types import Group, Response
from longstraw_jax.update import init_optimizer, replicas_equal, update

# (mesh, what is trained, implementation): 1, 2, 4 and 8 devices, both axes used. Compiling is what costs, so not every combination.
RUNS = [((1, 1), "lora", "auto"), ((2, 1), "all", "cudnn"), ((2, 2), "lora", "auto"), ((8, 1), "all", "auto")]


@pytest.fixture(scope="module")
def conventional():
    """Loss and gradient of the plain pass, by what is trained and what is differentiated; the same numbers on every mesh."""
    with jax.enable_x64(True):
        return {(kind, gradient): case.conventional(case.policy((1, 1), kind), case.group(), fixed=fixed)
                for kind in ("all", "lora") for gradient, fixed in (("response", case.PROMPT - 1), ("full", 0))}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("mesh", "trainable", "implemented"), RUNS)
def test_the_gradient_is_autodiffs_on_every_mesh(mesh, trainable, implemented, conventional, monkeypatch):
    """For cuDNN's kernel its formula stands in here: what is held is which rows it gets, a block at a time, and what becomes of them."""
    monkeypatch.setattr(paged_attention, "_TOGETHER", 1)
    policy, group = case.policy(mesh, trainable), case.group()
    with implementation(implemented):
        state = capture(policy, group.prompt_ids, gradient="full")
        replayed = case.replayed(policy, state, group, gradient="full")
        loss, wanted = conventional[trainable, "response"]
        assert replayed.loss == pytest.approx(loss, rel=1e-11)
        assert case.farthest(policy, replayed.gradient, wanted) < 1e-9
        full = sweep(policy, state, group.prompt_ids, replayed).gradient
    wanted = conventional[trainable, "full"][1]
    assert all(np.linalg.norm(x) > 0 for x in wanted.values())
    assert case.farthest(policy, full, wanted) < 1e-9


@pytest.mark.usefixtures("x64")
def test_the_blocking_does_not_change_the_gradient(conventional):
    """One chunk and one block for everything; the other tests cut into many."""
    policy = case.policy((2, 1), sizes=BlockSizes())
    for gradient in ("response", "full"):
        assert case.farthest(policy, case.ours(policy, case.group(), gradient=gradient).gradient, conventional["lora", gradient][1]) < 1e-9


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_the_serial_gradient_is_the_whole_batchs_in_any_order(normalisation):
    objective = ObjectiveConfig(normalisation, kl_beta=0.1)
    policy, group = case.policy((1, 1)), case.group()
    loss, gradient = case.conventional(policy, group, objective)
    result = case.ours(policy, group, objective)
    assert result.loss == pytest.approx(loss, rel=1e-11)
    assert case.farthest(policy, result.gradient, gradient) < 1e-9

    turned = Group(group.prompt_ids, group.responses[::-1])
    state = capture(policy, group.prompt_ids)
    other = replay(policy, state, turned, old=case.others(group, 1)[::-1], reference=case.others(group, 2)[::-1], objective=objective)
    assert case.farthest(policy, other.gradient, case.by_name(policy, result.gradient)) < 1e-11


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_captured_and_replayed_equals_one_pass(mesh):
    """Prompts around the convolution's width, the page, the chunk; responses around the block."""
    policy = case.policy(mesh)
    weights = to_weights(policy)
    whole = jax.jit(lambda w, ids: policy.model.reference_logprobs(w, ids, 0))
    longest, chunk = 72, 32
    for prompt in (2, 3, 4, 5, chunk, chunk + 1, chunk + 2, 66):
        group = case.group((1, 2, 37), prompt, seed=prompt)
        state = capture(policy, group.prompt_ids, capacity=longest)
        for response, mine in zip(group.responses, score(policy, state, group.responses), strict=True):
            ids = np.concatenate([group.prompt_ids, response.ids])
            plain = whole(weights, jnp.asarray(np.pad(ids, (0, longest + 37 - len(ids)))))
            np.testing.assert_allclose(mine, plain[prompt - 1 : prompt - 1 + len(response.ids)], rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def single():
    """A float32 policy on two devices with its captured prompt."""
    policy = case.policy((2, 1), dtype="float32")
    group = case.group()
    return policy, group, capture(policy, group.prompt_ids)


def test_the_first_ratio_is_exactly_one(single):
    policy, group, state = single
    result = replay(policy, state, group, old=score(policy, state, group.responses))
    assert result.metrics["ratio_mean"] == result.metrics["ratio_max"] == 1.0
    assert result.metrics["clip_fraction"] == 0.0
    assert result.loss == replay(policy, state, group).loss


def test_members_do_not_disturb_each_other(single):
    policy, group, state = single
    there = score(policy, state, group.responses)
    back = score(policy, state, group.responses[::-1])[::-1]
    for a, b in zip(there, back, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(score(policy, state, group.responses[1:2])[0], there[1], rtol=0, atol=2e-6)


def test_pads_and_masked_tokens_may_hold_anything(single):
    policy, group, state = single
    far = [np.where(r.mask, old, -1e4) for r, old in zip(group.responses, case.others(group, 1), strict=True)]
    near = case.others(group, 1)
    a, b = (replay(policy, state, group, old=old) for old in (far, near))
    assert a.loss == b.loss
    assert all(np.array_equal(x, y) for x, y in zip(*(jax.tree.leaves(r.gradient) for r in (a, b)), strict=True))


def test_a_fresh_adapter_is_its_reference(single):
    """B = 0 and adapters off are the same program on the same numbers: KL exactly 0."""
    policy, group, _ = single
    fresh = policy.reference()
    reference = fresh.reference()
    rows = score(reference, capture(reference, group.prompt_ids), group.responses)
    result = replay(fresh, capture(fresh, group.prompt_ids), group, reference=rows, objective=ObjectiveConfig(kl_beta=0.5))
    assert result.metrics["kl_reference_k3"] == 0.0


@pytest.mark.parametrize("rewards", [(1.0, 1.0, 1.0), (0.0, 1.0, 2.0)])
def test_nothing_to_learn_changes_nothing(single, rewards):
    """Equal rewards, or every token masked: loss 0, no NaN, parameters and moments as they were."""
    policy, group, state = single
    masked = len(set(rewards)) > 1
    responses = [Response(r.ids, mask=np.zeros(len(r.ids), bool) if masked else None, reward=x)
                 for r, x in zip(group.responses, rewards, strict=True)]
    result = replay(policy, state, Group(group.prompt_ids, tuple(responses)))
    assert result.loss == 0.0
    config = OptimizerConfig("adamw", 0.1, weight_decay=0.5)
    moved = update(policy, init_optimizer(policy, config), result.gradient, config)
    assert moved.policy is policy
    assert moved.grad_norm == 0.0


def test_an_update_moves_all_replicas_alike_and_the_logprobs(single):
    policy, group, state = single
    config = OptimizerConfig("adamw", 1e-2)
    before = replay(policy, state, group)
    moved = update(policy, init_optimizer(policy, config), before.gradient, config).policy
    assert replicas_equal(moved.trainable)
    program = members_program(policy.model, policy.mesh)
    compiled = len(program.executables)
    after = score(moved, capture(moved, group.prompt_ids), group.responses)
    assert len(program.executables) == compiled
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(after, before.logprobs, strict=True))
    with pytest.raises(InputError, match="captured from other parameters"):
        replay(moved, state, group)


def test_a_state_belongs_to_its_prompt(single):
    policy, group, state = single
    other = Group((group.prompt_ids + 1) % 64, group.responses)
    with pytest.raises(InputError, match="captured from other prompt"):
        replay(policy, state, other)


def test_few_programs_for_many_lengths(single):
    policy, group, state = single
    program = members_program(policy.model, policy.mesh)
    assert len({bucket(policy.model, n) for n in range(1, 1025)}) <= 11
    before = len(program.executables)
    for n in (9, 11, 13, 16):
        score(policy, state, [Response(np.arange(n))])
    assert len(program.executables) - before == 1
