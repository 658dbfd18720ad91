"""From text to token ids, and back."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle_jax.engine.tokenizer import apply_chat_template
from eagle_jax.errors import InputError

INCOMPLETE = "\ufffd"


def encode(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, str]],
    variables: Mapping[str, Any] | None = None,
    *,
    chat: bool = False,
    system: str | None = None,
) -> list[int]:
    """Returns the ids of a prompt, special tokens as the tokenizer adds them.

    Args:
        tokenizer: A `transformers` tokenizer.
        prompt: A text, or the messages of a conversation, each with a `role` and its
            `content`, up to where the model goes on: these go through the tokenizer's
            chat template, which writes the special tokens itself.
        variables: See `apply_chat_template`.
        chat: Whether a text is wrapped as a user's turn of a conversation.
        system: What the system says before the conversation; `None` for nothing.

    Raises:
        InputError: If there is no template, or it refuses the prompt, or the prompt is
            no text or has no token.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt {prompt!r} is not valid Unicode text"
            ) from error
    messages = [{"role": "user", "content": prompt}] if chat else prompt
    text = prompt
    if isinstance(messages, str) and (variables or system is not None):
        raise InputError(
            "`system` and `chat_template_kwargs` belong to conversations; give `chat`, "
            "or messages as the prompt"
        )
    if not isinstance(messages, str):
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        if not (tokenizer.chat_template or (variables or {}).get("chat_template")):
            raise InputError(
                "conversations need a chat template, but the tokenizer has none; give "
                "a chat model, or prompts that are no conversations"
            )
        text, _ = apply_chat_template(
            tokenizer, messages, variables, add_generation_prompt=True
        )
    ids = tokenizer(
        text, add_special_tokens=isinstance(messages, str), verbose=False
    ).input_ids
    if not ids:
        raise InputError(
            f"the prompt {text!r} has no token and this tokenizer adds none; give "
            "a prompt with text"
        )
    return list(ids)


def as_prompts(prompts: Any) -> list[Any]:
    """Returns the list of prompts, where one may have been given alone.

    Args:
        prompts: A text, token ids, the messages of a conversation, or a list of these.

    Raises:
        InputError: If it is none of these, or empty.
    """
    given = _as_list(prompts)
    is_one = isinstance(given, str) or (
        len(given) > 0
        and not isinstance(given[0], str | Sequence)
        and np.ndim(given[0]) == 0
    )
    found = [given] if is_one else [_as_list(prompt) for prompt in given]
    if not found or not all(len(prompt) for prompt in found if prompt != ""):
        raise InputError("no prompts were given; at least one with a token is needed")
    return found


def _as_list(given: Any) -> Any:
    """Returns a text as it is, arrays as lists, and a message as a conversation."""
    if isinstance(given, Mapping):
        return [given]
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, Sequence) and not isinstance(found, bytes):
        return found
    raise InputError(
        f"{given!r} is no prompt; give a text, token ids, the messages of a "
        "conversation, or a list of these"
    )


def continuation(
    tokenizer: Any,
    prompt: list[int],
    generated: list[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Returns the text that the generated ids add to the prompt's.

    Both are decoded together, since tokenizers drop or add spaces at a text's
    beginning. A character that the prompt begins and the generated ids end is theirs.

    Args:
        tokenizer: A `transformers` tokenizer.
        prompt: The prompt's token ids.
        generated: The token ids after them.
        skip_special_tokens: Whether special tokens are left out.
    """
    skip = skip_special_tokens
    whole = decode(tokenizer, prompt + generated, skip)
    return whole[_cut(decode(tokenizer, prompt, skip), whole) :]


class TextStream:
    """A text that grows with its tokens, by characters that are complete."""

    def __init__(
        self, tokenizer: Any, prompt: list[int], *, skip_special_tokens: bool = True
    ) -> None:
        """Starts after a prompt, given as token ids."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._skips = skip_special_tokens
        self._prompt_text = decode(tokenizer, prompt, skip_special_tokens)
        # Decoding begins at `_start`, and `_shown` counts characters from there. What
        # follows `_next_start`, a later place, does not depend on what precedes it.
        self._start = self._next_start = self._shown = 0
        # Tokenizers of Llama 2's kind decode a run of bytes as a whole: one that fits
        # nowhere takes back the characters before it. Others know no such token.
        wrong = tokenizer.convert_tokens_to_ids("<0xFF>")
        self._wrong_byte = [] if wrong in (None, tokenizer.unk_token_id) else [wrong]

    def update(self, generated: list[int], *, is_last: bool) -> str:
        """Returns the text that became certain since the last call.

        Args:
            generated: All token ids generated so far.
            is_last: Whether no more will come; nothing is held back then.
        """
        text = certain = self._text(self._start, generated)
        if not is_last:  # The bytes of a character may be split over tokens.
            worst = self._text(self._start, generated + self._wrong_byte)
            same = itertools.takewhile(
                lambda pair: pair[0] == pair[1],
                zip(text.rstrip(INCOMPLETE), worst, strict=False),
            )
            certain = "".join(character for character, _ in same)
        if self._start == 0:
            self._shown = max(self._shown, _cut(self._prompt_text, certain))
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        # A text that begins with nothing may lose the space after it.
        if certain == text and (rest := self._text(self._next_start, generated)):
            self._start, self._shown = self._next_start, len(rest)
            self._next_start = len(self._prompt) + len(generated)
        return new

    def _text(self, start: int, generated: list[int]) -> str:
        begin = max(0, start - len(self._prompt))
        ids = self._prompt[start:] + generated[begin:]
        return decode(self._tokenizer, ids, self._skips)


def _cut(prompt: str, whole: str) -> int:
    """Returns where a prompt's text ends in the whole, which may end its last bytes."""
    end = len(prompt.rstrip(INCOMPLETE))
    while end < len(prompt) and whole[end : end + 1] == INCOMPLETE:
        end += 1
    return end


def decode(tokenizer: Any, ids: list[int], skip_special_tokens: bool = True) -> str:
    """Returns the text of token ids, as the tokenizer's decoder writes it."""
    return tokenizer.decode(
        ids,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
