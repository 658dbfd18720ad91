"""Conversations as prompts, in the form that a chat model was trained with.

The text of "vicuna" is FastChat's, character for character (`vicuna_v1.1`).
"""

import typing
from collections.abc import Sequence
from typing import Any, Literal

from eagle_jax.errors import InputError
from eagle_jax.generation import text

Template = Literal["tokenizer", "vicuna", "none"]
"""Names of the forms in which turns become a prompt.

`tokenizer` is the chat template that the tokenizer carries; `none` writes turns and
answers one after the other, for models that are no chat models.
"""

TEMPLATES: tuple[Template, ...] = typing.get_args(Template)

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def check_template(tokenizer: Any, template: Template) -> None:
    """Refuses the form "tokenizer" of a tokenizer without a chat template."""
    if template == "tokenizer" and not tokenizer.chat_template:
        raise InputError(
            "`template` tokenizer needs a chat template, but the tokenizer has none; "
            "give a chat model, or another template: vicuna, none"
        )


def encode(
    tokenizer: Any,
    template: Template,
    turns: Sequence[str],
    answers: Sequence[str],
    *,
    system: str | None = None,
) -> list[int]:
    """Returns the ids of a conversation up to where the model goes on.

    Args:
        tokenizer: A `transformers` tokenizer; it puts its own special tokens around
            all but its own template, which writes them itself.
        template: The form of the prompt.
        turns: The user's turns, the one to be answered last.
        answers: The model's answers to the turns before.
        system: The system prompt, see `render`.
    """
    if template == "tokenizer":
        messages = [] if system is None else [{"role": "system", "content": system}]
        for turn, answer in zip(turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": answer.strip()})
        messages.append({"role": "user", "content": turns[-1]})
        return text.encode(tokenizer, messages)
    ids = text.encode(tokenizer, render(template, turns, answers, system=system))
    start = tokenizer.bos_token_id
    if start is not None and ids[:2] == [start, start]:
        ids = ids[1:]  # The text begins with the token that was put in front.
    return ids


def render(
    template: Template,
    turns: Sequence[str],
    answers: Sequence[str],
    *,
    system: str | None = None,
) -> str:
    r"""Returns a conversation as text, without the tokenizer's special tokens.

    >>> render("vicuna", ["Hi", "Why?"], ["Yes"], system="Be kind.")
    'Be kind. USER: Hi ASSISTANT: Yes</s>USER: Why? ASSISTANT:'
    >>> render("none", ["Hi", "Why?"], ["Yes"])
    'Hi\n\nYes\n\nWhy?'

    Args:
        template: The form of the prompt, any but "tokenizer".
        turns: The user's turns, the one to be answered last.
        answers: The model's answers to the turns before; white space around them is
            left out, only line breaks for "none".
        system: The system prompt; `None` for the template's own, if it has one.
    """
    answered = list(zip(turns, answers, strict=False))
    if template == "vicuna":
        prompt = f"{VICUNA_SYSTEM if system is None else system} "
        for turn, answer in answered:
            # FastChat writes no separator after an empty answer.
            ending = f" {answer.strip()}</s>" if answer.strip() else ""
            prompt += f"USER: {turn} ASSISTANT:{ending}"
        return f"{prompt}USER: {turns[-1]} ASSISTANT:"
    parts = [] if system is None else [system]
    for turn, answer in answered:
        parts += [turn, answer.strip("\n")]
    return "\n\n".join([*parts, turns[-1]])
