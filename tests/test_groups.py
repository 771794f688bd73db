"""Groups from JSONL: every accepted spelling gives the same group; every fault is one line with the file and the line."""

import json

import numpy as np
import pytest

from longstraw_jax import tokenizer as tokenizer_module
from longstraw_jax.errors import InputError
from longstraw_jax.groups import load_tokenizer, read_groups

GOOD = {"prompt_ids": [1, 2], "responses": [{"ids": [3, 4], "reward": 1.0}, {"ids": [5], "reward": 0.0}]}


class Letters:
    """One id per character; turns as `<role>content`."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        text = "".join(f"<{turn['role']}>{turn['content']}" for turn in messages) + "<assistant>" * add_generation_prompt
        return self.encode(text, add_special_tokens=False) if tokenize else text


TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
         {"role": "user", "content": "so"}]
PROMPT = "<system>s<user>hi<assistant>yo<user>so<assistant>"


@pytest.fixture
def write(tmp_path):
    def write(*lines) -> str:
        path = tmp_path / "groups.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
        return str(path)
    return write


@pytest.fixture
def refused(write):
    def refused(line, *words, tokenizer=None):
        """The second line of a file, after a good one, is refused: on one line, with the place and all `words`."""
        path = write(GOOD, line)
        with pytest.raises(InputError) as caught:
            read_groups(path, tokenizer)
        message = str(caught.value)
        assert "\n" not in message
        for word in (f"{path}:2: ", *words):
            assert word in message, message
    return refused


def test_groups_come_in_order_with_every_field(write):
    full = {"prompt_ids": [7, 8], "group_id": "b",
            "responses": [{"ids": [3, 4], "advantage": -0.5, "mask": [1, 0], "logprobs": [-1.0, 0.0]}]}
    path = write("", GOOD, "  ", full, "")
    first, second = read_groups(path)
    assert first.prompt_ids.tolist() == [1, 2] and first.group_id == f"{path}:2"
    assert [response.ids.tolist() for response in first.responses] == [[3, 4], [5]]
    assert [response.reward for response in first.responses] == [1.0, 0.0]
    assert first.responses[0].mask.all() and first.responses[0].logprobs is None
    (response,) = second.responses
    assert (second.group_id, second.prompt_ids.tolist()) == ("b", [7, 8])
    assert (response.advantage, response.reward) == (-0.5, None)
    assert response.mask.tolist() == [True, False] and response.logprobs.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("line", [
    {"prompt_ids": [1, 2], "completion_ids": [[3, 4], [5]], "rewards": [1.0, 0.0], "completion_mask": [[1, 0], [1]],
     "sampling_per_token_logps": [[-1, -2], [-3]]},
    {"prompt": [1, 2], "completion_ids": [[3, 4], [5]], "completions": ["ab", "c"], "rewards": [1, 0],
     "tool_mask": [[1, 0], [1]], "old_per_token_logps": [[-1, -2], [-3]]},
    {"raw_prompt_ids": [1, 2], "responses": [[3, 4], [5]], "response_mask": [[1, 0], [1]], "rewards": [1, 0],
     "rollout_log_probs": [[-1, -2], [-3]], "uid": 12},
    {"prompt_ids": [1, 2], "response_ids": [[3, 4], [5]], "token_level_rewards": [[0.25, 0.75], [0]],
     "response_mask": [[1, 0], [1]], "old_log_probs": [[-1, -2], [-3]]},
    {"prompt_token_ids": [1, 2], "responses": [
        {"response_ids": [3, 4], "reward_score": 1.0, "loss_mask": [1, 0], "response_logprobs": [-1, -2]},
        {"token_ids": [5], "score": 0, "mask": None, "logprobs": [-3]}]},
    {"prompt_ids": [1, 2], "responses": [{"ids": [3, 4], "score": None, "mask": [1, 0]}, {"ids": [5]}], "rewards": [1, 0],
     "advantages": None,
     "logprobs": [[-1, -2], [-3]], "messages": None},
])
def test_every_spelling_gives_the_same_group(write, line):
    (group,) = read_groups(write(line))
    assert group.prompt_ids.tolist() == [1, 2]
    assert [response.ids.tolist() for response in group.responses] == [[3, 4], [5]]
    assert [response.mask.tolist() for response in group.responses] == [[True, False], [True]]
    assert [response.reward for response in group.responses] == [1.0, 0.0]
    assert [response.logprobs.tolist() for response in group.responses] == [[-1.0, -2.0], [-3.0]]
    assert group.group_id == ("12" if "uid" in line else group.group_id)


def test_lists_of_advantages(write):
    (group,) = read_groups(write({"prompt_ids": [1, 2], "completion_ids": [[3], [4]], "advantages": [0.5, -0.5]}))
    np.testing.assert_array_equal(group.advantages, [0.5, -0.5])


@pytest.mark.parametrize("change", [
    {"prompt_ids": []}, {"prompt_ids": [1]}, {"responses": []}, {"prompt_ids": [1, -2]}, {"prompt_ids": [1, 2.0]},
    {"prompt_ids": [1, True]}, {"prompt_ids": "ab"}, {"prompt_ids": None}, {"responses": None}, {"responses": {}},
    {"responses": [7]}, {"responses": [None]}, {"group_id": 1.5}, {"group_id": True}, {"group_id": []},
])
def test_faults_of_a_line(write, change):
    path = write(GOOD | change)
    with pytest.raises(InputError) as caught:
        read_groups(path)
    assert f"{path}:1: " in str(caught.value) and "wanted" in str(caught.value)


@pytest.mark.parametrize(("response", "words"), [
    ({"ids": [], "reward": 0.0}, ["an empty response"]),
    ({"ids": [1, 2.5], "reward": 0.0}, ["ids[1] is 2.5"]),
    ({"ids": [1], "reward": float("nan")}, ["reward is nan"]),
    ({"ids": [1], "reward": float("-inf")}, ["reward is -inf"]),
    ({"ids": [1], "reward": "1"}, ["reward is '1'"]),
    ({"ids": [1], "reward": 0.0, "mask": [1, 1]}, ["mask has length 2"]),
    ({"ids": [1], "reward": 0.0, "mask": [3]}, ["mask[0] is 3"]),
    ({"ids": [1], "reward": 0.0, "logprobs": [-1, -1]}, ["logprobs has length 2"]),
    ({"ids": [1], "reward": 0.0, "logprobs": [0.5]}, ["logprobs[0] is 0.5"]),
    ({"ids": [1], "reward": 0.0, "advantage": 1.0}, ["both a reward"]),
    ({"ids": [1], "rewrad": 0.0}, ["unknown key 'rewrad'", "'reward'"]),
    ({"ids": [1], "reward": 0.0, "rewrad": None}, ["unknown key 'rewrad'"]),
    ({"ids": [1], "reward": 0.0, "zzzzzz": 1}, ["unknown key 'zzzzzz'", "wanted one of ids"]),
    ({"ids": [1], "response_ids": [1], "reward": 0.0}, ["'ids' and 'response_ids' both give"]),
    ({"ids": [1], "reward": 0.0, "score": 0.0}, ["'reward' and 'score' both give"]),
    ({"reward": 0.0}, ["neither ids nor text"]),
    ({"ids": [1], "token_level_rewards": [1, 1]}, ["one number per token"]),
    ({"ids": [1], "token_level_rewards": ["1"]}, ["token_level_rewards[0] is '1'"]),
    ({"ids": [1], "token_level_rewards": [1], "reward": 1}, ["both a reward and token_level_rewards"]),
    ({"ids": [1], "advantage": [0.5]}, ["advantage is [0.5]"]),
    ([], ["an empty response"]),
    ([{"role": "assistant", "content": "a"}], ["chat turns are not read"]),
])
def test_faults_of_a_response_name_it(refused, response, words):
    refused({"prompt_ids": [1, 2], "responses": [{"ids": [9], "reward": 1.0}, response]}, "response 1: ", *words)


@pytest.mark.parametrize(("change", "words"), [
    ({"rewrads": [1, 0]}, ["unknown key 'rewrads'", "'rewards'"]),
    ({"reward": 1.0}, ["unknown key 'reward'", "'rewards'"]),
    ({"rewards": [1]}, ["'completion_ids' has 2 entries and 'rewards' has 1"]),
    ({"rewards": [1, 0, 0]}, ["'completion_ids' has 2 entries and 'rewards' has 3"]),
    ({"rewards": 1.0}, ["'rewards' is 1.0", "list"]),
    ({"rewards": [1, None]}, ["response 1 has neither a reward nor an advantage"]),
    ({"completion_mask": [[1, 1], [1, 1]]}, ["response 1: mask has length 2"]),
    ({"completion_mask": [[1, 1], [1]], "response_mask": [[1, 1], [1]]}, ["'response_mask' both give the field 'mask'"]),
    ({"sampling_per_token_logps": [[-1, -1], [-1]], "old_log_probs": [[-1, -1], [-1]]}, ["both give the field 'logprobs'"]),
    ({"responses": [{"ids": [3]}, {"ids": [4]}]}, ["response 0: its 'ids' is given in the response and in the line's"]),
    ({"advantages": [1, 0]}, ["response 0: both a reward"]),
    ({"advantages": [None, 1], "rewards": [1, None]}, ["response 1 has no reward"]),
    ({"prompt": [1, 2]}, ["'prompt_ids' and 'prompt' both give the field 'prompt_ids'"]),
    ({"raw_prompt_ids": [1, 2]}, ["'prompt_ids' and 'raw_prompt_ids' both give"]),
])
def test_faults_of_lists(refused, change, words):
    line = {"prompt_ids": [1, 2], "completion_ids": [[3, 4], [5]], "rewards": [1.0, 0.0], "group_id": "b"}
    refused(line | change, *words)


@pytest.mark.parametrize(("line", "words"), [
    ("{\"prompt_ids\": [1, 2]", ["invalid JSON", "column"]),
    ("[1, 2]", ["[1, 2] was given", "one JSON object per line"]),
    ("null", ["None was given"]),
    ("[" * 100_000, ["invalid JSON"]),
    ("1" * 5_000, ["invalid JSON"]),
    ("{\"prompt_ids\": [1, 2], \"responses\": [{\"ids\": [1], \"reward\": 1, \"reward\": 0}]}", ["'reward' is given twice"]),
    ("{\"prompt_ids\": [1, 2], \"responses\": [{\"ids\": [1], \"reward\": NaN}]}", ["response 0: reward is nan"]),
])
def test_lines_that_are_not_groups(refused, line, words):
    refused(line, *words)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_groups_is_refused(tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"empty\.jsonl holds no group"):
        read_groups(tmp_path / "empty.jsonl")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*none\.jsonl: No such file.*; wanted a JSONL file"):
        read_groups(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot read .*directory; wanted a JSONL file"):
        read_groups(tmp_path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n{\"prompt\": \"caf\xe9\"}\n")
    with pytest.raises(InputError, match=r"latin\.jsonl:2: byte 15 is not UTF-8"):
        read_groups(path)


def test_windows_files_are_read(tmp_path):
    line = json.dumps(GOOD).encode()
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line)
    assert len(read_groups(tmp_path / "windows.jsonl")) == 2


def test_text_is_encoded(write):
    path = write({"prompt": "ab", "responses": [{"text": "cd", "reward": 1, "mask": [0, 1]}, {"text": "e", "reward": 0}]},
                 {"prompt": "ab", "completions": ["cd", "e"], "rewards": [1, 0]})
    for group in read_groups(path, Letters()):
        assert group.prompt_ids.tolist() == [97, 98]
        assert [response.ids.tolist() for response in group.responses] == [[99, 100], [101]]


def test_ids_are_the_truth_beside_text(write):
    line = {"prompt_ids": [1, 2], "prompt": "ab", "responses": [{"ids": [3], "text": "xyz", "reward": 1}]}
    for tokenizer in (None, Letters()):
        (group,) = read_groups(write(line), tokenizer)
        assert group.prompt_ids.tolist() == [1, 2] and group.responses[0].ids.tolist() == [3]


@pytest.mark.parametrize("change", [{"prompt": "ab"}, {"messages": TURNS}, {"prompt": TURNS}])
def test_text_needs_a_tokenizer(refused, change):
    refused({"responses": GOOD["responses"]} | change, "no tokenizer", "prompt_ids")


def test_response_text_needs_a_tokenizer(refused):
    refused({"prompt_ids": [1, 2], "responses": [{"text": "a", "reward": 1}]}, "response 0: ", "no tokenizer", "ids")


@pytest.mark.parametrize(("change", "words"), [
    ({}, ["the prompt is missing"]),
    ({"prompt": 5}, ["5 was given for text"]),
    ({"prompt": "ab", "messages": TURNS}, ["both 'prompt' and 'messages'"]),
    ({"prompt": TURNS, "messages": TURNS}, ["'messages' and 'prompt' both give"]),
    ({"prompt": ""}, ["the prompt has 0 token"]),
    ({"prompt": "ab", "responses": [{"text": "", "reward": 1}]}, ["response 0: an empty response"]),
    ({"prompt": "ab", "responses": [{"text": 5, "reward": 1}]}, ["response 0: 5 was given for text"]),
    ({"prompt": "ab", "responses": [{"text": "cd", "reward": 1, "mask": [1]}]}, ["response 0: mask has length 1"]),
    ({"messages": []}, ["messages is []"]),
    ({"messages": "hi"}, ["messages is 'hi'"]),
    ({"messages": [{"content": "hi"}]}, ["wanted turns"]),
    ({"messages": [{"role": "user"}]}, ["the chat template refuses the messages"]),
])
def test_faults_of_text(refused, change, words):
    refused({"responses": GOOD["responses"]} | change, *words, tokenizer=Letters())


@pytest.mark.parametrize("name", ["messages", "prompt", "raw_prompt"])
def test_messages_become_the_templates_prompt(write, name):
    (group,) = read_groups(write({name: TURNS, "responses": GOOD["responses"]}), Letters())
    assert group.prompt_ids.tolist() == [ord(letter) for letter in PROMPT]


def test_the_tokenizer_of_a_directory_is_at_hand():
    assert load_tokenizer is tokenizer_module.load_tokenizer
