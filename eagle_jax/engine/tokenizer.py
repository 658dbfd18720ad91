"""The tokenizer that a checkpoint carries, and its chat template."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.hf_fields import warn_once
from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import read_json

# Importing transformers advises to install torch, which tokenizers do not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
    if not own:  # Without its files, transformers makes up one of special tokens.
        raise InputError(
            f"{folder} holds no usable tokenizer: there is no vocabulary, such as "
            "tokenizer.json or tokenizer.model; copy the tokenizer's files there"
        )
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
    if settings.get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
