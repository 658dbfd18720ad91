"""Prompts as FastChat writes them, and what a tokenizer makes of them."""

from typing import Any

import pytest

from eagle_jax.evaluation.templates import encode

# What FastChat's `Conversation.get_prompt` gives for these turns.
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. "
    "USER: One? ASSISTANT: Yes.</s>USER: Two? ASSISTANT:"
)
TURNS, ANSWERS = ["One?", "Two?"], [" Yes.\n"]


@pytest.mark.parametrize(
    ("template", "turns", "answers", "expected"),
    [
        ("vicuna", TURNS, ANSWERS, VICUNA),
        ("vicuna", TURNS[:1], [], VICUNA[: VICUNA.index(" Yes")]),
        # No separator follows an empty answer.
        ("vicuna", TURNS, ["\n"], VICUNA.replace(" Yes.</s>", "")),
        # Indentation stays.
        ("none", ["def f():", "f()"], ["\n    g\n"], "def f():\n\n    g\n\nf()"),
    ],
)
def test_the_text_is_fastchats_or_plain_turns_after_one_bos(
    template: Any,
    turns: list[str],
    answers: list[str],
    expected: str,
    tokenizer: Any,
) -> None:
    first, *ids = encode(tokenizer, template, turns, answers)
    assert first == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == expected


def test_the_tokenizers_own_template_writes_its_own_bos(tokenizer: Any) -> None:
    ids = encode(tokenizer, "tokenizer", TURNS, ANSWERS)
    expected = "<s>[user]One?[assistant]Yes.</s>[user]Two?[assistant]"
    assert tokenizer.decode(ids) == expected
    assert ids.count(tokenizer.bos_token_id) == 1
