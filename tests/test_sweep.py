"""The prompt's share of the gradient: windows, group sizes, and that each of its paths carries weight. In float64."""

import dataclasses

import jax
import numpy as np
import pytest

import engine_case as case
from longstraw_jax.capture import capture
from longstraw_jax.config import GradientConfig
from longstraw_jax.errors import InputError
from longstraw_jax.replay import replay
from longstraw_jax.sweep import sweep
from longstraw_jax.types import Group

CAPTURED = case.PROMPT - 1  # 74 positions: chunks at 0, 32 and 64
EARLY, LAST = 62, 63  # tokens that stand once in the whole group: early in the prompt, and as its last token


@pytest.fixture(scope="module")
def group():
    drawn = case.group()
    prompt = np.minimum(drawn.prompt_ids, EARLY - 1)
    prompt[[3, -1]] = EARLY, LAST
    return Group(prompt, tuple(dataclasses.replace(r, ids=np.minimum(r.ids, EARLY - 1)) for r in drawn.responses))


@pytest.fixture(scope="module")
def policy():
    with jax.enable_x64(True):
        return case.policy((2, 1), "all")


@pytest.fixture(scope="module")
def wanted(policy, group):
    """wanted(fixed): the plain pass's gradient with that many positions held fixed."""
    done = {}

    def gradient(fixed):
        if fixed not in done:
            done[fixed] = case.conventional(policy, group, fixed=fixed)[1]
        return done[fixed]

    return gradient


def swept(policy, group, gradient, change=lambda cotangent: cotangent):
    """The gradient by `gradient`'s options; `change` alters the state's cotangent before the sweep."""
    state = capture(policy, group.prompt_ids, gradient=gradient)
    replayed = case.replayed(policy, state, group, gradient=gradient)
    if replayed.cotangent:
        replayed = dataclasses.replace(replayed, cotangent=change(replayed.cotangent))
    return sweep(policy, state, group.prompt_ids, replayed, gradient=gradient)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("window", [26, 10, 1000], ids=["inside a chunk", "a chunk's edge", "everything"])
def test_a_window_is_the_truncated_gradient(policy, group, wanted, window, where):
    options = GradientConfig("full", window, entry_states=where)
    fixed = max(0, CAPTURED - window)
    assert options.fixed(CAPTURED) == fixed
    assert case.farthest(policy, swept(policy, group, options).gradient, wanted(fixed)) < 1e-9


@pytest.mark.usefixtures("x64")
def test_no_window_at_all_is_the_response_gradient(policy, group, wanted):
    assert case.farthest(policy, swept(policy, group, GradientConfig("full", 0)).gradient, wanted(CAPTURED)) < 1e-9


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("window", [0, 26, 10, None])
def test_the_cosine_to_the_full_gradient(policy, group, wanted, window):
    result = swept(policy, group, GradientConfig("full", window, measure_cosine=True))
    part, full = (wanted(CAPTURED - n) for n in (CAPTURED if window is None else window, CAPTURED))
    a, b = (np.concatenate([x[name].ravel() for name in full]) for x in (part, full))
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert (cosine < 0.99) == (window is not None)
    assert result.metrics["full_gradient_cosine"] == pytest.approx(cosine, rel=1e-9)
    assert case.farthest(policy, result.gradient, part) < 1e-9  # measuring does not change it


def without(part):
    def change(cotangent):
        rows, recurrent = cotangent.rows, cotangent.recurrent
        rows = {name: 0 * x if name == part else x for name, x in rows.items()}
        return dataclasses.replace(cotangent, rows=rows, recurrent={name: 0 * x if name == part else x for name, x in recurrent.items()})

    return change


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("part", ["k", "v", "S", "tail"])
def test_each_part_of_the_state_carries_gradient(policy, group, wanted, part):
    """Without one of them the comparisons above would fail by orders of magnitude."""
    assert case.farthest(policy, swept(policy, group, "full").gradient, wanted(0)) < 1e-9
    assert case.farthest(policy, swept(policy, group, "full", without(part)).gradient, wanted(0)) > 1e-3


@pytest.mark.usefixtures("x64")
def test_each_parameter_learns_from_the_prompt(policy, group, wanted):
    """Its share is no rounding error in any parameter below the state, keys' and values' projections and embeddings included."""
    full, response = wanted(0), wanted(CAPTURED)
    last = f"model.layers.{case.SPEC.num_hidden_layers - 1}."
    above = [name for name in full if name.startswith((last, "lm_head.", "model.norm."))
             and not any(part in name for part in ("input_layernorm", "k_proj", "v_proj", "k_norm"))]
    for name in full:
        share = case.relative(response[name], full[name])
        assert share == 0 if name in above else share > 1e-2, name
    mine = case.by_name(policy, swept(policy, group, "full").gradient)["model.embed_tokens.weight"]
    for token, in_response in ((EARLY, False), (LAST, True)):
        assert case.relative(mine[token], full["model.embed_tokens.weight"][token]) < 1e-9
        assert response["model.embed_tokens.weight"][token].any() == in_response


@pytest.mark.usefixtures("x64")
def test_a_larger_group_of_all_lengths():
    policy, group = case.policy((1, 1)), case.group((16, 1, 33, 7, 37, 2, 12, 20), prompt=41, seed=4)
    group = Group(group.prompt_ids, tuple(dataclasses.replace(r, reward=None, advantage=1.0 - i) for i, r in enumerate(group.responses)))
    assert case.farthest(policy, case.ours(policy, group, gradient="full").gradient, case.conventional(policy, group, fixed=0)[1]) < 1e-9


@pytest.mark.usefixtures("x64")
def test_a_state_must_reach_as_far_as_the_sweep(policy, group):
    state = capture(policy, group.prompt_ids)
    replayed = replay(policy, state, group, gradient="full")
    assert replayed.metrics["ratio_max"] == replayed.metrics["ratio_mean"] == 1.0
    with pytest.raises(InputError, match="holds no entry states, and this gradient goes back to position 0"):
        sweep(policy, state, group.prompt_ids, replayed)
    near = GradientConfig("full", 26)
    state = capture(policy, group.prompt_ids, gradient=near)
    assert sorted(state.entries.states) == [32, 64]
    replayed = replay(policy, state, group, gradient=near)
    with pytest.raises(InputError, match="entry states from position 32 on, and this gradient goes back to position 0"):
        sweep(policy, state, group.prompt_ids, replayed)
    with pytest.raises(InputError, match="captured from other prompt"):
        sweep(policy, state, group.prompt_ids[::-1], replayed, gradient=near)


@pytest.mark.parametrize(("options", "says"), [
    (dict(kind="half"), "wanted one of response, full"), (dict(kind="full", prompt_gradient_window=-1), "whole number of positions"),
    (dict(prompt_gradient_window=5), "wanted gradient 'full'"), (dict(kind="full", entry_states="disk"), "'device' or 'host'")])
def test_options_that_make_no_sense(options, says):
    with pytest.raises(InputError, match=says):
        GradientConfig(**options)
