"""Text to ids: the chat template's prefix property, and what is loaded when a library or a file is missing."""

import json
import sys
from collections import UserDict

import pytest

from longstraw_jax import tokenizer as tokenizer_module
from longstraw_jax.errors import InputError
from longstraw_jax.tokenizer import TextEncoder, load_tokenizer


class Letters:
    """One id per character; turns as `<role>content`, which a subclass may spoil."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def render(self, messages):
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        text = self.render(messages) + "<assistant>" * add_generation_prompt
        return self.encode(text, add_special_tokens=False) if tokenize else text


class Batched(Letters):
    """As transformers 5: ids in a mapping."""

    def apply_chat_template(self, messages, tokenize=True, **options):
        rendered = super().apply_chat_template(messages, tokenize=tokenize, **options)
        return UserDict(input_ids=rendered) if tokenize else rendered


class OnlyIds(Letters):
    """Renders ids whatever is asked for."""

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        return super().apply_chat_template(messages, True, add_generation_prompt)


class Forgetful(Letters):
    """Drops the content of assistant turns that are not the last, as templates do with earlier reasoning."""

    def render(self, messages):
        *early, last = messages
        return super().render([turn | {"content": ""} if turn["role"] == "assistant" else turn for turn in early] + [last])


class NeedsUser(Letters):
    """Refuses a lone system turn."""

    def render(self, messages):
        if all(turn["role"] == "system" for turn in messages):
            raise ValueError("No user query\nfound")
        return super().render(messages)


TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
         {"role": "user", "content": "so"}]
PROMPT = "<system>s<user>hi<assistant>yo<user>so<assistant>"


def refused(build, *words: str) -> None:
    """`build()` raises InputError on one line that holds every one of `words`."""
    with pytest.raises(InputError) as caught:
        build()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("tokenizer", [Letters(), Batched(), OnlyIds(), NeedsUser()])
def test_messages_become_the_templates_prompt(tokenizer):
    assert TextEncoder(tokenizer).chat(TURNS) == [ord(letter) for letter in PROMPT]


@pytest.mark.parametrize("spoilt", [Forgetful, type("ForgetfulIds", (Forgetful, OnlyIds), {})])
def test_a_template_without_the_prefix_property_is_refused(spoilt):
    refused(lambda: TextEncoder(spoilt()).chat(TURNS), "the first 3 of 4 messages is not a prefix", "prompt_ids")
    assert TextEncoder(spoilt()).chat(TURNS[:2]) == [ord(letter) for letter in "<system>s<user>hi<assistant>"]


def test_a_generation_prompt_that_changes_the_last_turn_is_refused():
    class Rewrites(Letters):
        def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
            last = messages[-1] | {"content": "!"} if add_generation_prompt else messages[-1]
            return super().apply_chat_template([*messages[:-1], last], tokenize, add_generation_prompt)

    refused(lambda: TextEncoder(Rewrites()).chat(TURNS), "the first 4 of 4")


def test_a_template_that_refuses_the_messages():
    refused(lambda: TextEncoder(NeedsUser()).chat(TURNS[:1]), "No user query found", "prompt_ids")


class Plain:
    """No chat template, and an encoder that fails."""

    def encode(self, text, add_special_tokens):
        raise UnicodeEncodeError("utf-8", text, 0, 1, "surrogates not allowed")


def test_what_a_tokenizer_cannot_do():
    refused(lambda: TextEncoder(Plain()).chat(TURNS), "no chat template", "prompt_ids")
    refused(lambda: TextEncoder(Plain()).text("\ud800"), "cannot encode", "surrogates", "give ids")


def test_without_a_tokenizer_text_is_refused():
    for build in (lambda: TextEncoder(None).text("a"), lambda: TextEncoder(None).chat(TURNS)):
        refused(build, "the model directory has no tokenizer", "prompt_ids")


@pytest.fixture
def model_dir(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<u>": 2, "<a>": 3}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}<u> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}), "utf-8")
    return tmp_path


def test_load_tokenizer_with_transformers(model_dir):
    pytest.importorskip("transformers")
    encoder = TextEncoder(load_tokenizer(model_dir))
    assert encoder.text("b a") == [1, 0]
    assert encoder.chat([{"role": "user", "content": "b"}]) == [2, 1, 3]


def test_load_tokenizer_with_less(model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.encode("b a", add_special_tokens=False) == [1, 0]
    refused(lambda: TextEncoder(tokenizer).chat(TURNS), "no chat template", "transformers")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer(model_dir) is None


def test_load_tokenizer_finds_none_or_says_why(tmp_path, monkeypatch):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(InputError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert load_tokenizer(tmp_path) is None  # a format that only transformers reads
    (tmp_path / "tokenizer.json").write_text("{bad", "utf-8")
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read: .*; wanted"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_reports_what_transformers_raises(tmp_path, monkeypatch):
    def broken(directory):
        raise RuntimeError("bad\nmodel")

    monkeypatch.setattr(tokenizer_module, "_from_transformers", broken)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be read: bad model; wanted"):
        load_tokenizer(tmp_path)
