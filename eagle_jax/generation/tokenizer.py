"""The tokenizer that a checkpoint carries, and its chat template."""

import contextlib
import datetime
import json
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import read_json

# Importing transformers advises to install torch, which tokenizers do not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_TODAY = "strftime_now"
"""The function that chat templates call for today's date, with a format."""

_VOCABULARIES = (
    "tokenizer.*",
    "*vocab*",
    "*.model",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "tekken.json",
    "merges.txt",
    "*bpe.codes",
)
"""The names of vocabulary files, of all tokenizers that transformers knows."""

# The line break at its end belongs to it: templates begin with a line of their own.
_MACRO = """\
{%- macro strftime_now(format) -%}
{%- set text = namespace(value=format) -%}
{%- for directive, value in TABLE -%}
{%- set text.value = text.value | replace(directive, value) -%}
{%- endfor -%}
{{- text.value -}}
{%- endmacro %}
"""


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Loads a tokenizer; code that a checkpoint brings along is never run.

    Args:
        folder: The folder that `checkpoints.resolve` returned.
        vocab_size: The number of tokens the target knows, `V`.

    Returns:
        The `transformers` tokenizer.

    Raises:
        InputError: If there is no usable one, or it knows ids beyond the target's.
    """
    # To find out by itself takes transformers seconds and, if it is there, PyTorch.
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        raise _without_vocabulary(folder)
    try:
        kind = _tokenizer_class(folder)
        # Left unset, transformers asks on a terminal whether to run such code.
        tokenizer = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        highest = max(tokenizer.get_vocab().values(), default=-1)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A broken file ends in whatever its parser trips over; what tokenizers' Rust
        # code ends in is no `Exception`.
        raise InputError(
            f"{folder} holds no usable tokenizer: {first_line(error)}"
        ) from error
    # Without its files, transformers makes up a tokenizer of special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise _without_vocabulary(folder)
    if highest >= vocab_size:
        raise InputError(
            f"{folder}: the tokenizer knows ids up to {highest}, but the target's "
            f"embedding has {vocab_size} rows; they do not belong together"
        )
    return tokenizer


class RefusedError(InputError):
    """A chat template refused one conversation; it may take others."""


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], **arguments: Any
) -> Any:
    """Renders a conversation.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        messages: The messages, each with a `role` and its `content`.
        **arguments: The further arguments of `tokenizer.apply_chat_template`.

    Returns:
        The text or the token ids, as the arguments ask for.

    Raises:
        RefusedError: If the template raises an error for these messages.
        InputError: If the template is not valid.
    """
    from jinja2 import TemplateSyntaxError

    try:
        return tokenizer.apply_chat_template(list(messages), **arguments)
    except (TemplateSyntaxError, RecursionError) as error:
        raise InputError(
            f"the chat template is no valid template: {first_line(error)}"
        ) from error
    except Exception as error:  # Templates are programs and raise what they like.
        raise RefusedError(
            f"the chat template refuses the conversation: {first_line(error)}"
        ) from error


def fix_date(tokenizer: Any, date: str | None = None) -> str | None:
    """Lets a tokenizer's chat templates take one date for today's, from now on.

    Prompts of one run are equal then, whatever day they are made on. The time of day
    is midnight.

    Args:
        tokenizer: A `transformers` tokenizer.
        date: The ISO date, such as "2025-07-26", that an earlier run recorded; `None`
            for today's.

    Returns:
        The ISO date to record, `None` where no template asks for one.

    Raises:
        InputError: If the given date is no date.
    """
    given = tokenizer.chat_template
    templates = given if isinstance(given, dict) else {"": given or ""}
    if not any(_TODAY in template for template in templates.values()):
        return None
    try:
        today = datetime.date.today()
        day = today if date is None else datetime.date.fromisoformat(date)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the recorded date {date!r} is no date such as 2025-07-26; start again "
            "with another output"
        ) from error
    table = [("%%", "\0")]
    for letter in string.ascii_letters:
        for directive in (f"%{letter}", f"%-{letter}"):  # With "-" no leading zeros.
            with contextlib.suppress(ValueError):  # Not every system knows all.
                table.append((directive, day.strftime(directive)))
    table.append(("\0", "%"))
    # A macro, as the newer versions of transformers let no function in.
    macro = _MACRO.replace("TABLE", json.dumps(table))
    fixed = {name: macro + template for name, template in templates.items()}
    tokenizer.chat_template = fixed if isinstance(given, dict) else fixed[""]
    return day.isoformat()


def _without_vocabulary(folder: Path) -> InputError:
    return InputError(
        f"{folder} holds no usable tokenizer: there is no vocabulary, such as "
        "tokenizer.json or tokenizer.model; copy the tokenizer's files there"
    )


def _tokenizer_class(folder: Path) -> Any:
    """Returns the tokenizer's class; to import all of transformers takes seconds."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if settings.get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
