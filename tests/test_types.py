"""Host-side groups: what is accepted, what it becomes, and one line for everything that is refused."""

import dataclasses
import math

import numpy as np
import pytest

from longstraw_jax.errors import InputError
from longstraw_jax.types import Group, Response, group_advantages


def refused(build, *words: str) -> None:
    """`build()` raises InputError on one line that holds every one of `words`."""
    with pytest.raises(InputError) as caught:
        build()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def group(rewards=(1.0, 0.0), **options) -> Group:
    responses = tuple(Response([5, 6, 7], reward=reward) for reward in rewards)
    return Group(**{"prompt_ids": [1, 2], "responses": responses, "group_id": "a", **options})


def test_response_defaults_and_dtypes():
    response = Response([3, 4], reward=1, logprobs=[-0.5, 0.0])
    assert (response.ids.dtype, response.mask.dtype, response.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    assert response.mask.tolist() == [True, True]
    assert response.logprobs.tolist() == [-0.5, 0.0]
    assert type(response.reward) is float and response.advantage is None
    assert Response([3], reward=0.0).logprobs is None
    assert Response([3], reward=0.0, logprobs=[np.float32(-1)]).logprobs.tolist() == [-1.0]


def test_arrays_are_private_and_read_only():
    ids, mask = np.array([3, 4], np.int64), np.array([True, False])
    response = Response(ids, mask, reward=0.0)
    ids[0], mask[0] = 9, False
    assert response.ids.tolist() == [3, 4] and response.mask.tolist() == [True, False]
    for array in (response.ids, response.mask, group().prompt_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        response.reward = 2.0


@pytest.mark.parametrize("mask", [[1, 0, 0, 1], [True, False, False, True], np.array([1.0, 0.0, 0.0, 1.0])])
def test_a_mask_may_have_holes(mask):
    assert Response([1, 2, 3, 4], mask, reward=1.0).mask.tolist() == [True, False, False, True]


def test_a_response_may_be_masked_altogether():
    assert not Response([1, 2], [0, 0], reward=1.0).mask.any()


@pytest.mark.parametrize("ids", [[], (), np.array([], np.int32), np.array([])])
def test_an_empty_response_is_refused(ids):
    refused(lambda: Response(ids, reward=1.0), "an empty response")


@pytest.mark.parametrize(("ids", "named"), [
    ([1, 3.0], "ids[1] is 3.0"),
    ([1, True], "ids[1] is True"),
    ([1, None], "ids[1] is None"),
    (["1"], "ids[0] is '1'"),
    ([4, -1], "ids[1] is -1"),
    ([2**31], f"ids[0] is {2**31}"),
    ([10**30], "ids[0] is 1000000"),
    ([[1, 2]], "ids[0] is [1, 2]"),
    (np.array([1.0, 2.0]), "ids[0] is 1.0"),
    (np.array([True]), "ids[0] is True"),
    (np.array([[1], [2]]), "ids[0] is [1]"),
    (np.array([2**40]), "ids[0] is"),
    (np.int32(3), "ids: 3 was given"),
    ("12", "ids: '12' was given"),
    ({1: 2}, "flat list"),
])
def test_ids_that_are_not_ids_are_refused(ids, named):
    refused(lambda: Response(ids, reward=1.0), named, "wanted")
    refused(lambda: group(prompt_ids=ids), named.replace("ids", "prompt_ids"), "group a", "wanted")


def test_numpy_integers_of_any_width_are_ids():
    assert Response([np.int64(3), np.uint8(4)], reward=1.0).ids.tolist() == [3, 4]
    assert Response(np.array([2**31 - 1], np.uint64), reward=1.0).ids.tolist() == [2**31 - 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), "1", True, [1.0], 10**400])
@pytest.mark.parametrize("field", ["reward", "advantage"])
def test_scores_that_are_not_finite_numbers_are_refused(field, value):
    refused(lambda: Response([1], **{field: value}), f"{field} is", "finite number")


@pytest.mark.parametrize(("mask", "named"), [
    ([1], "length 1, but the response has 2"),
    ([1, 1, 1], "length 3, but the response has 2"),
    ([1, 2], "mask[1] is 2"),
    ([0.5, 1], "mask[0] is 0.5"),
    ([1, math.nan], "mask[1] is nan"),
    ([1, "1"], "mask[1] is '1'"),
    ([1, -1], "mask[1] is -1"),
    (1, "mask: 1 was given"),
])
def test_masks_that_do_not_fit_are_refused(mask, named):
    refused(lambda: Response([1, 2], mask, reward=1.0), named, "wanted")


@pytest.mark.parametrize(("logprobs", "named"), [
    ([-1.0], "length 1, but the response has 2"),
    ([], "length 0, but the response has 2"),
    ([-1.0, 0.1], "logprobs[1] is 0.1"),
    ([math.nan, -1.0], "logprobs[0] is nan"),
    ([-math.inf, -1.0], "logprobs[0] is -inf"),
    ([-1e300, -1.0], "logprobs[0] is -1e+300"),
    ([None, -1.0], "logprobs[0] is None"),
    ([False, -1.0], "logprobs[0] is False"),
])
def test_logprobs_that_do_not_fit_are_refused(logprobs, named):
    refused(lambda: Response([1, 2], reward=1.0, logprobs=logprobs), named, "wanted")


def test_reward_and_advantage_together_are_refused():
    refused(lambda: Response([1], reward=1.0, advantage=0.5), "both a reward (1.0) and an advantage (0.5)", "drop")


@pytest.mark.parametrize(("prompt", "tokens"), [([], "0 token"), ([1], "1 token")])
def test_prompts_too_short_are_refused(prompt, tokens):
    refused(lambda: group(prompt_ids=prompt), "group a", tokens, "at least 2")


def test_a_group_of_nothing_is_refused():
    refused(lambda: group(responses=()), "group a", "responses is empty")
    refused(lambda: group(responses=[[1, 2]]), "group a", "tuple of Response")
    refused(lambda: group(group_id=7), "group_id is 7", "string")


def test_scores_must_be_of_one_kind():
    scored, given, bare = Response([1], reward=1.0), Response([1], advantage=0.5), Response([1])
    refused(lambda: group(responses=[scored, bare]), "group a", "response 1", "neither a reward nor an advantage")
    refused(lambda: group(responses=[scored, scored, given]), "group a", "response 2 has no reward")
    refused(lambda: group(responses=[given, scored]), "group a", "response 1 has no advantage")
    refused(lambda: group(responses=[bare], group_id=None), "the group: response 0")


def test_messages_stay_on_one_line_whatever_the_name():
    refused(lambda: group(responses=(), group_id="a\nb"), r"group 'a\nb'")


def test_advantages_are_relative_to_the_group():
    rewards = np.array([1.0, 0.0, 0.25, 3.0])
    expected = (rewards - 1.0625) / (math.sqrt(((rewards - 1.0625) ** 2).sum() / 3) + 1e-4)
    np.testing.assert_allclose(group_advantages(rewards), expected, rtol=1e-14)
    np.testing.assert_array_equal(group(rewards=rewards.tolist()).advantages, group_advantages(rewards))
    assert group_advantages([1, 0]).dtype == np.float64
    assert group_advantages([1, 0])[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4), rel=1e-14)


@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3, 1e300])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_equal_rewards_have_no_advantage(reward, count):
    assert group_advantages([reward] * count).tolist() == [0.0] * count


def test_given_advantages_are_used_as_they_are():
    responses = [Response([1], advantage=value) for value in (0.1, 0.1, -3.0)]
    assert group(responses=responses).advantages.tolist() == [0.1, 0.1, -3.0]
    assert group(responses=responses[:1]).advantages.tolist() == [0.1]


@pytest.mark.parametrize(("rewards", "named"), [
    ([], "empty"),
    ([1.0, math.nan], "rewards[1] is nan"),
    ([math.inf, math.inf], "rewards[0] is inf"),
    ([1.0, None], "rewards[1] is None"),
    ([[1.0]], "rewards[0] is [1.0]"),
    (1.0, "flat list"),
    ([1e200, -1e200], "reach 1e+200"),
    ([1.7e308, 1.7e308, 1.0], "reach 1.7e+308"),
])
def test_rewards_without_an_advantage_are_refused(rewards, named):
    refused(lambda: group_advantages(rewards), named, "wanted")


def test_check_accepts_exactly_the_limits():
    group().check(vocab_size=8, max_positions=5)
    group().check(vocab_size=8)


def test_check_names_the_first_id_outside_the_vocabulary():
    refused(lambda: group().check(vocab_size=6), "group a: response 0: ids[1] is 6", "0 to 5")
    refused(lambda: group().check(vocab_size=2), "group a: prompt_ids[1] is 2", "0 to 1")
    late = [Response([1], reward=0.0), Response([1, 9], reward=1.0)]
    refused(lambda: group(responses=late, group_id=None).check(9), "the group: response 1: ids[1] is 9")


def test_one_token_over_the_limit_is_refused_not_cut():
    refused(lambda: group().check(vocab_size=8, max_positions=4), "group a", "response 0", "take 5 positions", "at most 4")
    late = [Response([1], reward=0.0), Response([1, 1, 1], reward=1.0)]
    refused(lambda: group(responses=late).check(8, max_positions=4), "response 1 (3)", "nothing is cut")
