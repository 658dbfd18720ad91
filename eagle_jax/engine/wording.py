"""From text to token ids and back: tokenizers, chat templates, growing texts."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from eagle_jax.checkpoints.hf_fields import warn_once
from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import read_json

# Importing transformers advises to install torch, which tokenizers do not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = (
    str | Sequence[int] | np.ndarray | jax.Array | Message | Sequence[Message]
)
"""A text, token ids, or the messages of a conversation."""

INCOMPLETE = "\ufffd"


def load_tokenizer(
    folder: Path, vocab_size: int, stop_tokens: Sequence[int] | None = None
) -> Any:
    """Loads a tokenizer; code that a checkpoint brings along is never run.

    Tokens that were added to it may lie beyond the embedding, as some do for padding:
    prompts that hold one are refused.

    Args:
        folder: The folder that `checkpoints.resolve` returned.
        vocab_size: The number of tokens the target knows, `V`.
        stop_tokens: The ids that end the target's texts, with a warning where the
            tokenizer's end token is none of them; `None` for no warning.

    Returns:
        The `transformers` tokenizer.

    Raises:
        InputError: If there is no usable one, or its own ids, those that were not
            added, go beyond the target's.
    """
    try:
        # Left unset, transformers asks on a terminal whether to run such code.
        tokenizer = _tokenizer_class(folder).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        added = tokenizer.get_added_vocab()
        own = {n for token, n in tokenizer.get_vocab().items() if token not in added}
        if not own:  # Without its files, transformers makes up one of special tokens.
            files = "tokenizer.json or tokenizer.model"
            raise InputError(f"there is no vocabulary, such as {files}")
        length = tokenizer.model_max_length
        if not isinstance(length, int | float):
            raise InputError(f"model_max_length = {length!r} must be a number")
        # What the first prompt, and an unknown token, would trip over.
        tokenizer.decode(tokenizer("a").input_ids)
        tokenizer.convert_tokens_to_ids("<0xFF>")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A broken file ends in whatever its parser trips over; what tokenizers' Rust
        # code ends in is no `Exception`.
        said = first_line(error).replace(str(folder), folder.name)
        reason = said.partition(". ")[0].rstrip(".")
        raise InputError(
            f"{folder} holds no usable tokenizer: {reason}; copy the tokenizer's files "
            "there"
        ) from error
    if max(own) >= vocab_size:
        raise InputError(
            f"{folder}: the tokenizer knows ids up to {max(own)}, but the target's "
            f"embedding has {vocab_size} rows; they do not belong together"
        )
    end = tokenizer.eos_token_id
    if stop_tokens is not None and end not in (None, *stop_tokens):
        warn_once(
            f"{folder}: {tokenizer.eos_token!r}, the tokenizer's end token, ends no "
            f"text: the model's stop tokens are {[*stop_tokens]}; set eos_token_id in "
            f"generation_config.json, or stop_token_ids, to {end}"
        )
    return tokenizer


class RefusedError(InputError):
    """A chat template refused one conversation; it may take others."""


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool,
) -> tuple[str, list[tuple[int, int]] | None]:
    """Renders a conversation as `tokenizer.apply_chat_template` does of the same.

    A template is a program that came with a checkpoint. It runs in Jinja's sandbox: it
    reaches nothing but what it is given.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        messages: The messages, each with a `role` and its `content`.
        variables: Its other arguments: `tools`, dictionaries or functions; `documents`;
            `chat_template`, the name of one of several or a template; and whatever
            variables the template has.
        add_generation_prompt: Whether the text ends where the assistant begins, unless
            `variables` says.

    Returns:
        The text, and where in it the template's {% generation %} blocks begin and end,
        `None` if it has none.

    Raises:
        RefusedError: If the template raises an error for these messages.
        InputError: If the template is not valid, or there is none of that name.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    refused = "the chat template refuses the conversation"
    if not messages:
        raise RefusedError(f"{refused}: it has no message")
    given = {"add_generation_prompt": add_generation_prompt} | dict(variables or {})
    template = _template(tokenizer, given.pop("chat_template", None), given)
    try:
        has_blocks = _GENERATION_BLOCK.search(template) is not None
        rendered: Any = render_jinja_template(
            conversations=[[_without_none(message) for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=has_blocks,
            **tokenizer.special_tokens_map | given,
        )
    except (TemplateSyntaxError, RecursionError) as error:
        told = f"the chat template is no valid template: {first_line(error)}"
        raise InputError(told) from error
    except Exception as error:  # Templates raise what they like.
        raise RefusedError(f"{refused}: {first_line(error)}") from error
    (text,), blocks = rendered
    return text, blocks[0] if has_blocks else None


def _template(tokenizer: Any, name: Any, variables: Mapping[str, Any]) -> str:
    """Returns the template that is meant by its name, its text, or neither."""
    several = tokenizer.chat_template
    known = sorted(several) if isinstance(several, dict) else []
    is_text = isinstance(name, str) and "{" in name
    if not is_text and name not in (None, *known):
        raise InputError(
            f"chat_template = {name!r} is the name of no template; the tokenizer has "
            f"{', '.join(known) or 'one without a name'}"
        )
    try:
        return tokenizer.get_chat_template(name, variables.get("tools"))
    except ValueError as error:
        raise InputError(first_line(error)) from error


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _tokenizer_class(folder: Path) -> Any:
    """Returns the tokenizer's class; to import all of transformers takes seconds."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    names = ("PreTrainedTokenizerFast", "TokenizersBackend")  # One class.
    if settings.get("tokenizer_class") in names:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


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
        InputError: If there is no tokenizer or no template, or it refuses the prompt,
            or the prompt is no text or has no token.
    """
    if tokenizer is None:
        raise InputError("a pair without a tokenizer reads no text")
    messages = text = prompt
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            told = f"the prompt {prompt!r} is not valid Unicode text"
            raise InputError(told) from error
        messages = [{"role": "user", "content": prompt}] if chat else prompt
    is_plain = isinstance(messages, str)
    if is_plain and (variables or system is not None):
        raise InputError(
            "`system` and `chat_template_kwargs` belong to conversations; give `chat`, "
            "or messages as the prompt"
        )
    if not is_plain:
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
    ids = tokenizer(text, add_special_tokens=is_plain, verbose=False).input_ids
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
