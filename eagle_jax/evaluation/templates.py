"""Conversations as prompts, in the form that a chat model was trained with."""

import typing
from collections.abc import Sequence
from typing import Any, Literal

from eagle_jax.engine import wording as text

Template = Literal["tokenizer", "vicuna", "none"]
"""Names of the forms in which turns become a prompt.

`tokenizer` is the chat template that the tokenizer carries; `none` writes turns and
answers one after the other, for models that are no chat models.
"""

TEMPLATES: tuple[Template, ...] = typing.get_args(Template)

_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_WRITTEN = {
    # FastChat's text (`vicuna_v1.1`), which has no separator after an empty answer;
    # Vicuna's own tokenizer carries no template.
    "vicuna": _VICUNA_SYSTEM + " {% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} ASSISTANT:"
    "{% elif message.content %} {{ message.content }}</s>"
    "{% endif %}{% endfor %}",
    "none": "{{ messages | map(attribute='content') | join('\n\n') }}",
}
"""The forms that no tokenizer carries, as chat templates."""


def encode(
    tokenizer: Any,
    template: Template,
    turns: Sequence[str],
    answers: Sequence[str],
) -> list[int]:
    """Returns the ids of a conversation up to where the model goes on.

    Args:
        tokenizer: A `transformers` tokenizer; it puts its own special tokens around
            all but its own template, which writes them itself.
        template: The form of the prompt.
        turns: The user's turns, the one to be answered last.
        answers: The model's answers to the turns before; white space around them is
            left out, only line breaks for "none".
    """
    messages = []
    for turn, answer in zip(turns, answers, strict=False):
        said = answer.strip("\n") if template == "none" else answer.strip()
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": said})
    messages.append({"role": "user", "content": turns[-1]})
    if template != "tokenizer":
        written = tokenizer.apply_chat_template(
            messages, chat_template=_WRITTEN[template], tokenize=False
        )
        return text.encode(tokenizer, written)
    return text.encode(tokenizer, messages)
