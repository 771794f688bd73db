"""Text to token ids, for groups that give text. Tokenizers are optional: ids need none, and are never re-encoded.

A tokenizer is any object with `encode(text, add_special_tokens=False)` and, for messages, `apply_chat_template(messages,
tokenize=..., add_generation_prompt=...)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longstraw_jax.errors import InputError
from longstraw_jax.types import shown

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class _PlainTokenizer:
    """`tokenizers.Tokenizer` behind the interface above; it knows no chat template."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def load_tokenizer(model_dir: str | os.PathLike) -> Any | None:
    """The tokenizer in an HF model directory; None if it has none, or neither `transformers` nor `tokenizers` is installed.

    Never downloads, and never runs code from the directory. Raises InputError if the directory does not exist or its
    tokenizer files cannot be read.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise InputError(f"the model directory {directory} does not exist or is no directory; wanted a local HF checkpoint")
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        return None
    try:
        return _from_transformers(directory)
    except ImportError:
        pass  # not installed: the vocabulary alone will do
    except Exception as error:  # whatever a broken file makes the library raise
        if not (directory / "tokenizer.json").is_file():
            raise _unreadable(directory, error) from error
    return _from_tokenizers(directory / "tokenizer.json")


def _from_transformers(directory: Path) -> Any:
    from transformers import AutoTokenizer  # optional, and seconds to import

    # trust_remote_code=None would ask on the terminal
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


def _from_tokenizers(path: Path) -> Any | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    if not path.is_file():
        return None
    try:
        return _PlainTokenizer(Tokenizer.from_file(str(path)))
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"the tokenizer in {path} cannot be read: {_one_line(error)}; wanted the files that HF saves, or none")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class TextEncoder:
    """Turns the text of groups into ids with `tokenizer`; None is allowed and refuses the first text it meets."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer = tokenizer

    def text(self, text: Any) -> list[int]:
        """The ids of `text` alone: no start- or end-of-text token is added. Raises InputError."""
        if not isinstance(text, str):
            raise InputError(f"{shown(text)} was given for text; wanted a string")
        tokenizer = self._required()
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # lone surrogates, for example: JSON can hold text that is not Unicode
            raise InputError(f"the tokenizer cannot encode {shown(text)}: {_one_line(error)}; give ids instead") from error

    def chat(self, messages: Any) -> list[int]:
        """The ids of the chat template's prompt for `messages`, up to where the assistant is to speak.

        A prefix of the turns must give a prefix of the prompt: a template that edits earlier turns (many drop earlier
        reasoning) would make a prompt that the model never saw while it sampled them. Prefixes that the template refuses to
        render, such as a lone system turn, are passed over. Raises InputError.
        """
        if not (isinstance(messages, list) and messages and all(_is_turn(turn) for turn in messages)):
            raise InputError(f"messages is {shown(messages)}; wanted turns, at least one: {{\"role\": .., \"content\": ..}}")
        if not hasattr(self._required(), "apply_chat_template"):
            raise InputError("messages were given, but the tokenizer has no chat template (transformers is needed for one); "
                             "give prompt_ids instead")
        try:
            whole = self._render(messages, tokenize=False, add_generation_prompt=True)
            ids = self._render(messages, tokenize=True, add_generation_prompt=True)
        except Exception as error:
            raise InputError(f"the chat template refuses the messages: {_one_line(error)}; give prompt_ids") from error
        for turns in range(1, len(messages) + 1):
            try:
                part = self._render(messages[:turns], tokenize=False, add_generation_prompt=False)
            except Exception:
                continue
            if whole[:len(part)] != part:
                raise InputError(f"the chat template of the first {turns} of {len(messages)} messages is not a prefix of "
                                 "that of all: it edits earlier turns; wanted one that does not: give prompt_ids instead")
        return ids

    def _required(self) -> Any:
        if self._tokenizer is None:
            raise InputError("text was given, but the model directory has no tokenizer (or none that an installed library "
                             "reads); give token ids instead: prompt_ids, and ids in each response")
        return self._tokenizer

    def _render(self, messages: list, **options: bool) -> str | list[int]:
        """Text or ids: the ids come bare or, from transformers 5 on, in a mapping."""
        rendered = self._tokenizer.apply_chat_template(messages, **options)
        if isinstance(rendered, Mapping):
            rendered = rendered["input_ids"]
        return rendered if isinstance(rendered, str) else list(rendered)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str)
