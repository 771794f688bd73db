"""Groups from a JSONL file, one group a line; the names of TRL and verl are understood.

    {"prompt_ids": [..], "responses": [{"ids": [..], "reward": 1.0}, ..], "group_id": "a"}

| field | of | meaning | other names |
|---|---|---|---|
| `prompt_ids` | line | the prompt's token ids | `prompt_token_ids` (vLLM), `raw_prompt_ids` (verl), `prompt` holding ids |
| `prompt` | line | the prompt's text, encoded without special tokens | |
| `messages` | line | the prompt as chat turns | `raw_prompt` (verl), `prompt` holding turns (TRL, verl) |
| `responses` | line | a list of objects with the fields below, of id lists or of texts | `completions` (TRL) |
| `group_id` | line | a string, or a whole number | `uid` (verl) |
| `ids` | response | the response's token ids | `completion_ids` (TRL), `response_ids` (verl), `token_ids` (vLLM) |
| `text` | response | its text, encoded without special tokens: no end of text is added | `completion` (TRL), `response` |
| `mask` | response | 1 for a trained token | `completion_mask`, `tool_mask` (TRL), `response_mask` (verl), `loss_mask` |
| `reward` | response | its score | `score`, `reward_score` (verl) |
| `advantage` | response | used as it is, instead of a reward | |
| `logprobs` | response | log-probabilities under the engine that sampled it | see below |
| `token_level_rewards` | response | one number per token; their sum is the reward (as verl's GRPO) | |

Instead of a field in each response, the line may hold one list with an entry per response: `completion_ids`, `response_ids`,
`completion_mask`, `tool_mask`, `response_mask`, `loss_mask`, `rewards`, `advantages`, `token_level_rewards`, and any name of
`logprobs`, which are `sampling_per_token_logps`, `old_per_token_logps` (TRL), `rollout_log_probs`, `response_logprobs` and
`old_log_probs` (verl). The trainer's own (`old_*`) are the sampling engine's only where the two agree.

Ids are the truth: where ids and text are both given, the text is for people and is not read. A null is a field not given.
Everything else that is unknown, given twice or of another length is an error: nothing is ignored, cut or padded.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from longstraw_jax.errors import InputError, LongstrawError
from longstraw_jax.tokenizer import TextEncoder
from longstraw_jax.tokenizer import load_tokenizer as load_tokenizer
from longstraw_jax.types import Group, Response, is_finite, shown

Names = Mapping[str, tuple[str, ...]]  # field -> the names it may be given by
Fields = dict[str, tuple[str, Any]]  # field -> (the name it was given by, value)
MASKS = ("completion_mask", "tool_mask", "response_mask", "loss_mask")
LOGPROBS = ("logprobs", "sampling_per_token_logps", "old_per_token_logps", "rollout_log_probs", "response_logprobs",
            "old_log_probs")
RESPONSE_NAMES: Names = {
    "ids": ("ids", "completion_ids", "response_ids", "token_ids"),
    "text": ("text", "completion", "response"),
    "mask": ("mask", *MASKS),
    "reward": ("reward", "score", "reward_score"),
    "advantage": ("advantage",),
    "logprobs": LOGPROBS,
    "token_level_rewards": ("token_level_rewards",),
}
LIST_NAMES: Names = {  # response fields that a line may give as one list
    "ids": ("completion_ids", "response_ids"),
    "mask": MASKS,
    "reward": ("rewards",),
    "advantage": ("advantages",),
    "logprobs": LOGPROBS,
    "token_level_rewards": ("token_level_rewards",),
}
LINE_NAMES: Names = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "raw_prompt_ids"),
    "prompt": ("prompt",),
    "messages": ("messages", "raw_prompt"),
    "responses": ("responses", "completions"),
    "group_id": ("group_id", "uid"),
    **LIST_NAMES,
}


def read_groups(path: str | os.PathLike, tokenizer: Any | None = None) -> list[Group]:
    """The groups in a JSONL file, in its order; blank lines do not count.

    Args:
      path: the file; UTF-8, one JSON object a line (see the module's table).
      tokenizer: encodes what is given as text; see `load_tokenizer`. Groups of ids need none.

    Raises InputError with `file:line` for the first group that is not valid. `Group.check` compares the ids with a
    vocabulary. A group without a `group_id` is called by its file and line.
    """
    encoder = TextEncoder(tokenizer)
    groups = [_group(line, where, encoder) for where, line in _lines(path)]
    if not groups:
        raise InputError(f"{path} holds no group; wanted one JSON object per line")
    return groups


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Says where an error arose, in front of its message."""
    try:
        yield
    except LongstrawError as error:
        raise type(error)(f"{where}: {error}") from error


def _lines(path: str | os.PathLike) -> Iterator[tuple[str, str]]:
    """(file:line, text) of every line that is not blank. Read as bytes, so that an encoding error knows its line."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{os.fspath(path)}:{number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(f"{where}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
                if line.strip():
                    yield where, line
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; wanted a JSONL file with one group per line") from error


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_no_duplicates)
    except LongstrawError:
        raise
    except (ValueError, RecursionError) as error:
        problem = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise InputError(f"invalid JSON ({problem}); wanted one JSON object per line") from error
    if not isinstance(record, dict):
        raise InputError(f"{shown(record)} was given; wanted one JSON object per line")
    return record


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):  # JSON allows it, and the last would win in silence
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the key {twice!r} is given twice; keep one")
    return record


def _fields(record: dict[str, Any], names: Names) -> Fields:
    """The fields of a JSON object: every key must be known, and every field given once."""
    field_of = {name: field for field, aliases in names.items() for name in aliases}
    fields: Fields = {}
    for key, value in record.items():
        if key not in field_of:
            near = difflib.get_close_matches(key, field_of, n=1)
            hint = f"the nearest known one is {near[0]!r}" if near else f"wanted one of {', '.join(field_of)}"
            raise InputError(f"unknown key {key!r}; {hint}; nothing is ignored: rename or remove it")
        field = field_of[key]
        if value is None:
            continue
        if field in fields:
            raise InputError(f"{fields[field][0]!r} and {key!r} both give the field {field!r}; keep one")
        fields[field] = key, value
    return fields


def _group(line: str, where: str, encoder: TextEncoder) -> Group:
    with _at(where):
        fields = _fields(_parse(line), LINE_NAMES)
        prompt_ids = _prompt(fields, encoder)
        records = _records(fields)
        responses = []
        for i, record in enumerate(records):
            with _at(f"response {i}"):
                responses.append(_response(record, encoder))
        group_id = _group_id(fields)
    if group_id is None:
        return Group(prompt_ids, tuple(responses), where)  # whose own messages then say where
    with _at(where):
        return Group(prompt_ids, tuple(responses), group_id)


def _group_id(fields: Fields) -> str | None:
    name, value = fields.get("group_id", ("group_id", None))
    if not (value is None or isinstance(value, str) or type(value) is int):
        raise InputError(f"{name} is {shown(value)}; wanted a string or a whole number")
    return None if value is None else str(value)


def _prompt(fields: Fields, encoder: TextEncoder) -> Any:
    """The prompt's ids, unchecked; from text only where no ids are given."""
    given = {field: fields[field] for field in ("prompt_ids", "prompt", "messages") if field in fields}
    if isinstance(given.get("prompt", ("", ""))[1], list):  # `prompt` may hold ids or turns
        name, value = given.pop("prompt")
        field = "messages" if value and isinstance(value[0], dict) else "prompt_ids"
        if field in given:
            raise InputError(f"{given[field][0]!r} and {name!r} both give the field {field!r}; keep one")
        given[field] = name, value
    if "prompt_ids" in given:
        return given["prompt_ids"][1]
    if len(given) != 1:
        problem = "both 'prompt' and 'messages' are given" if given else "the prompt is missing"
        raise InputError(f"{problem}; wanted one of prompt_ids, prompt, messages")
    return encoder.chat(given["messages"][1]) if "messages" in given else encoder.text(given["prompt"][1])


def _records(fields: Fields) -> list[dict[str, Any]]:
    """One {field: value} per response, from the list of responses and from the lists with one entry per response."""
    lists = {field: fields[field] for field in ("responses", *LIST_NAMES) if field in fields}
    for name, value in lists.values():
        if not isinstance(value, list):
            raise InputError(f"{name!r} is {shown(value)}; wanted a list with one entry per response")
    if "responses" not in lists and "ids" not in lists:
        raise InputError("the responses are missing; wanted 'responses', a list of {\"ids\": [..], \"reward\": ..}")
    (first, entries), *others = lists.values()
    for name, value in others:
        if len(value) != len(entries):
            raise InputError(f"{first!r} has {len(entries)} entries and {name!r} has {len(value)}; wanted one per response "
                             "in both: nothing is cut")
    records: list[dict[str, Any]] = []
    for i, entry in enumerate(entries):
        with _at(f"response {i}"):
            record = _record(entry) if "responses" in lists else {}
            for field in (field for field in lists if field != "responses"):
                name, value = lists[field]
                if value[i] is not None and field in record:
                    raise InputError(f"its {field!r} is given in the response and in the line's {name!r}; keep one")
                record.setdefault(field, value[i])
        records.append(record)
    return records


def _record(entry: Any) -> dict[str, Any]:
    """{field: value} of an entry of `responses`: an object, a text or a list of ids."""
    if isinstance(entry, str):
        return {"text": entry}
    if isinstance(entry, list) and not (entry and isinstance(entry[0], dict)):
        return {"ids": entry}
    if isinstance(entry, dict):
        return {field: value for field, (_, value) in _fields(entry, RESPONSE_NAMES).items()}
    raise InputError(f"{shown(entry)} was given; wanted an object, a list of token ids or a text (chat turns are not read: "
                     "give the ids that were sampled)")


def _response(record: dict[str, Any], encoder: TextEncoder) -> Response:
    """Raises InputError, without the response's place."""
    if record.get("ids") is None and record.get("text") is None:
        raise InputError("it has neither ids nor text; wanted one of them")
    ids = encoder.text(record["text"]) if record.get("ids") is None else record["ids"]
    reward, token_rewards = record.get("reward"), record.get("token_level_rewards")
    if token_rewards is not None:
        if reward is not None:
            raise InputError("both a reward and token_level_rewards are given; keep one")
        reward = _summed(token_rewards, ids)
    return Response(ids, record.get("mask"), reward, record.get("advantage"), record.get("logprobs"))


def _summed(token_rewards: Any, ids: Any) -> float:
    if not (isinstance(token_rewards, list) and isinstance(ids, list) and len(token_rewards) == len(ids)):
        raise InputError(f"token_level_rewards is {shown(token_rewards)}; wanted a list with one number per token of the "
                         "response")
    bad = next((i for i, reward in enumerate(token_rewards) if not is_finite(reward)), None)
    if bad is not None:
        raise InputError(f"token_level_rewards[{bad}] is {shown(token_rewards[bad])}; wanted a finite number")
    return sum(float(reward) for reward in token_rewards)
