"""What crosses stages on the host: a prompt with its sampled responses, checked once and immutable from then on.

No JAX here. Arrays are copied, narrowed to their final dtype and made read-only, so that no later stage can change what the
receipt's fingerprint was taken from.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

from longstraw_jax.errors import InputError

MAX_ID = np.iinfo(np.int32).max
MIN_LOGPROB = -float(np.finfo(np.float32).max)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InputError(message)


def shown(value: Any) -> str:
    """`value` as an error message shows it: on one line, and short even for a million tokens."""
    return " ".join(reprlib.repr(value).split())


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value <= MAX_ID)


def _is_flag(value: Any) -> bool:
    return isinstance(value, (numbers.Real, np.bool_)) and value in (0, 1)


def _is_logprob(value: Any) -> bool:
    return _is_number(value) and bool(MIN_LOGPROB <= value <= 0)  # false for NaN, too


def is_finite(value: Any) -> bool:
    """A finite real number that is not a bool: Python would take True for 1, and so a mask for ids."""
    try:
        return _is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _flat(values: Any, what: str, accepts: Callable[[Any], bool], wanted: str, dtype: type) -> np.ndarray:
    """Checks entry by entry, before NumPy could turn a bool, 3.0 or None among the entries into something valid."""
    items = values.tolist() if hasattr(values, "tolist") else values
    _require(isinstance(items, (list, tuple)), f"{what}: {shown(items)} was given; wanted a flat list of {wanted}")
    bad = next((i for i, item in enumerate(items) if not accepts(item)), None)
    if bad is not None:
        raise InputError(f"{what}[{bad}] is {shown(items[bad])}; wanted {wanted}")
    array = np.array(items, dtype=dtype)
    array.flags.writeable = False
    return array


def _ids(values: Any, what: str) -> np.ndarray:
    return _flat(values, what, _is_id, f"token ids: integers from 0 to {MAX_ID}, not floats or bools", np.int32)


def _score(value: Any, what: str) -> float | None:
    _require(value is None or is_finite(value), f"{what} is {shown(value)}; wanted one finite number per response")
    return None if value is None else float(value)


def _set(instance: Any, **values: Any) -> None:
    """Sets the fields of a frozen dataclass while it is being made."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


@dataclass(frozen=True, eq=False, init=False)
class Response:
    """One sampled response of R tokens, and what it earned."""

    ids: Int32[np.ndarray, "R"]
    mask: Bool[np.ndarray, "R"]
    reward: float | None
    advantage: float | None
    logprobs: Float32[np.ndarray, "R"] | None

    def __init__(self, ids: Any, mask: Any = None, reward: Any = None, advantage: Any = None, logprobs: Any = None):
        """Checks and copies; InputError says what is wrong, but not the response's place in a group, which it cannot know.

        Args:
          ids: its tokens, without the prompt's; any flat sequence of integers.
          mask: 1 where a token is trained (all of them by default). A token that is not, such as a tool's output, still
            conditions the later ones, and leaves the denominators. All 0 is allowed: such a response has no loss.
          reward: its score, from which the group's advantages follow; or
          advantage: the advantage itself, used as it is. At most one of the two.
          logprobs: natural-log probabilities of `ids` under the engine that sampled them, at the sampling temperature.
        """
        ids = _ids(ids, "ids")
        _require(ids.size >= 1, "an empty response was given; wanted at least one token: drop it, or give its end of text")
        mask = np.ones(ids.size, bool) if mask is None else mask
        mask = _flat(mask, "mask", _is_flag, "0 (not trained) or 1 (trained)", np.bool_)
        if logprobs is not None:
            logprobs = _flat(logprobs, "logprobs", _is_logprob, "finite natural-log probabilities <= 0", np.float32)
        for name, array in (("mask", mask), ("logprobs", logprobs)):
            if array is not None and array.size != ids.size:
                raise InputError(f"{name} has length {array.size}, but the response has {ids.size} tokens; wanted one "
                                 "entry per token: nothing is cut or padded")
        reward, advantage = _score(reward, "reward"), _score(advantage, "advantage")
        _require(reward is None or advantage is None,
                 f"both a reward ({reward}) and an advantage ({advantage}) were given; wanted one of them: drop the other")
        _set(self, ids=ids, mask=mask, reward=reward, advantage=advantage, logprobs=logprobs)


@dataclass(frozen=True, eq=False, init=False)
class Group:
    """One prompt of P >= 2 tokens and its G >= 1 responses, which give either a reward each or an advantage each.

    A prompt needs two tokens: replay starts at its last one, so that the first response token is scored too, and the state
    that is captured before it must hold at least one position. `group_id` is what messages and receipts call the group.
    """

    prompt_ids: Int32[np.ndarray, "P"]
    responses: tuple[Response, ...]
    group_id: str | None

    def __init__(self, prompt_ids: Any, responses: Any, group_id: Any = None):
        """Checks and copies; InputError names the group and the response's index."""
        _require(group_id is None or isinstance(group_id, str), f"group_id is {shown(group_id)}; wanted a string or None")
        _set(self, group_id=group_id)
        prompt_ids = _ids(prompt_ids, f"{self.name}: prompt_ids")
        _require(prompt_ids.size >= 2, f"{self.name}: the prompt has {prompt_ids.size} token(s); wanted at least 2: "
                                       "lengthen it, for example by the model's start of text")
        if not (isinstance(responses, (list, tuple)) and all(isinstance(response, Response) for response in responses)):
            raise InputError(f"{self.name}: responses is {shown(responses)}; wanted a tuple of Response")
        _require(len(responses) >= 1, f"{self.name}: the list of responses is empty; wanted at least one response")
        _set(self, prompt_ids=prompt_ids, responses=tuple(responses))
        self._check_scores()

    def _check_scores(self) -> None:
        first = "advantage" if self.responses[0].advantage is not None else "reward"
        for i, response in enumerate(self.responses):
            _require(response.reward is not None or response.advantage is not None,
                     f"{self.name}: response {i} has neither a reward nor an advantage; wanted one of them for each")
            _require(getattr(response, first) is not None,
                     f"{self.name}: response {i} has no {first}, but response 0 has one; wanted rewards for all, or "
                     "advantages for all")

    @property
    def name(self) -> str:
        """How messages refer to the group."""
        if self.group_id is None:
            return "the group"
        return f"group {self.group_id if self.group_id.isprintable() else repr(self.group_id)}"  # always one line

    @property
    def advantages(self) -> Float64[np.ndarray, "G"]:
        """Per response: the given advantages as they are, or those that follow from the rewards."""
        if self.responses[0].advantage is not None:
            return np.array([response.advantage for response in self.responses], np.float64)
        return group_advantages([response.reward for response in self.responses])

    def check(self, vocab_size: int, max_positions: int | None = None) -> None:
        """Raises InputError unless every id is in the vocabulary and prompt + response fits in `max_positions` tokens."""
        named = [("prompt_ids", self.prompt_ids)]
        named += [(f"response {i}: ids", response.ids) for i, response in enumerate(self.responses)]
        for what, ids in named:
            bad = np.flatnonzero(ids >= vocab_size)
            if bad.size:
                raise InputError(f"{self.name}: {what}[{bad[0]}] is {ids[bad[0]]}; wanted 0 to {vocab_size - 1}, the "
                                 "model's vocabulary: tokenize with this model's own tokenizer")
        for i, response in enumerate(self.responses):
            P, R = self.prompt_ids.size, response.ids.size
            _require(max_positions is None or P + R <= max_positions,
                     f"{self.name}: the prompt ({P} tokens) and response {i} ({R}) take {P + R} positions; wanted at most "
                     f"{max_positions}: nothing is cut, so shorten one or raise the limit")


def group_advantages(rewards: Any) -> Float64[np.ndarray, "G"]:
    """Group-relative advantages of G rewards, any flat sequence: (r - mean) / (std + 1e-4), or exactly 0 if all are equal.

    The formula is Shao et al., 2024, section 4.1.2; the sample standard deviation (G - 1 in the denominator) and the 1e-4
    are those of TRL's `GRPOTrainer`. Raises InputError if a reward is not finite, or too large for the formula in float64.
    """
    rewards_G = _flat(rewards, "rewards", is_finite, "finite numbers, one per response", np.float64)
    _require(rewards_G.size >= 1, "an empty list of rewards was given; wanted one per response")
    if np.all(rewards_G == rewards_G[0]):
        return np.zeros_like(rewards_G)  # the mean of equal numbers may differ from them by rounding
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = rewards_G.mean(), rewards_G.std(ddof=1)
    _require(math.isfinite(mean) and math.isfinite(std),
             f"the rewards reach {np.abs(rewards_G).max()}; wanted less than about 1e150: scale them down")
    return (rewards_G - mean) / (std + 1e-4)
