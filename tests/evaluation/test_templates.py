"""Prompts as FastChat writes them, and what a tokenizer makes of them."""

from pathlib import Path
from typing import Any

import pytest

from eagle_jax.evaluation.templates import check_template, encode, render
from eagle_jax.generation.tokenizer import load_tokenizer
from tests.helpers import refused

# What FastChat's `Conversation.get_prompt` gives for these turns.
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. "
    "USER: One? ASSISTANT: Yes.</s>USER: Two? ASSISTANT:"
)
TURNS, ANSWERS = ["One?", "Two?"], [" Yes.\n"]


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: Path) -> Any:
    return load_tokenizer(tiny_pair / "target", 300)


@pytest.fixture(scope="module")
def chat_tokenizer(chat_pair: Path) -> Any:
    return load_tokenizer(chat_pair / "target", 300)


def test_the_text_is_fastchats_and_plain_turns_keep_their_indentation() -> None:
    assert render("vicuna", TURNS, ANSWERS) == VICUNA
    assert render("vicuna", TURNS[:1], []) == VICUNA[: VICUNA.index(" Yes")]
    empty = render("vicuna", TURNS, ["\n"], system="S.")
    assert empty == "S. USER: One? ASSISTANT:USER: Two? ASSISTANT:", "no separator"
    text = render("none", ["def f():", "f()"], ["\n    return 1\n"])
    assert text == "def f():\n\n    return 1\n\nf()"
    assert render("none", ["a"], [], system="s") == "s\n\na"


@pytest.mark.parametrize("template", ["vicuna", "none"])
def test_the_text_begins_with_one_bos(tokenizer: Any, template: Any) -> None:
    ids = encode(tokenizer, template, TURNS, ANSWERS)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id != ids[1]
    assert tokenizer.decode(ids[1:]) == render(template, TURNS, ANSWERS)
    bos = tokenizer.bos_token
    doubled = encode(tokenizer, "none", [f"{bos}Hi"], [])
    assert doubled == encode(tokenizer, "none", ["Hi"], [])


def test_the_tokenizers_own_template_writes_its_own_bos(chat_tokenizer: Any) -> None:
    ids = encode(chat_tokenizer, "tokenizer", TURNS, ANSWERS)
    assert chat_tokenizer.decode(ids) == (
        "<s>[user]One?[assistant]Yes.</s>[user]Two?[assistant]"
    )
    assert ids.count(chat_tokenizer.bos_token_id) == 1
    ids = encode(chat_tokenizer, "tokenizer", ["One?"], [], system="Be kind.")
    assert chat_tokenizer.decode(ids) == "<s>[system]Be kind.[user]One?[assistant]"


def test_what_a_tokenizer_cannot_write_is_refused(
    tokenizer: Any, chat_pair: Path
) -> None:
    refused(
        lambda: check_template(tokenizer, "tokenizer"),
        "needs a chat template, but the tokenizer",
    )
    check_template(tokenizer, "vicuna")
    strict = load_tokenizer(chat_pair / "target", 300)
    strict.chat_template = "{{ raise_exception('no system turns\\nplease') }}"
    refused(
        lambda: encode(strict, "tokenizer", ["One?"], [], system="Be kind."),
        "refuses the conversation: no system turns",
    )
