"""The tokenizer that a checkpoint carries, and its chat template."""

import atexit
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import read_json

# Importing transformers advises to install torch, which tokenizers do not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_SECONDS = 10
_MAX_MEMORY = 2**30
_MAX_TEXT = 2**24
_RENDERER_LOCK = threading.Lock()

# Each line of input is a conversation. What exceeds a limit ends the process: time, of
# this process alone, by a signal, and memory, which counts from what imports took.
_RENDER = """
import contextlib, json, os, sys
from transformers.utils.chat_template_utils import render_jinja_template
with contextlib.suppress(ImportError, OSError, ValueError):  # Not on every system.
    import resource
    with open("/proc/self/statm") as file:
        MEMORY += int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
def limit(seconds):
    with contextlib.suppress(ImportError, AttributeError):
        import signal
        signal.setitimer(signal.ITIMER_PROF, seconds)
for line in sys.stdin:
    limit(SECONDS)
    try:
        texts, blocks = render_jinja_template(**json.loads(line))
        answer = {"text": texts[0], "blocks": blocks[0] if blocks else []}
    except MemoryError:
        os._exit(1)
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        is_broken = bool(kinds & {"TemplateSyntaxError", "RecursionError"})
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        answer = {"text": "", "error": reason[:1000], "is_broken": is_broken}
    if len(answer["text"]) > TEXT:
        os._exit(1)
    print(json.dumps(answer), flush=True)
    limit(0)
"""


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Loads a tokenizer; code that a checkpoint brings along is never run.

    Tokens that were added to it may lie beyond the embedding, as some do for padding:
    prompts that hold one are refused.

    Args:
        folder: The folder that `checkpoints.resolve` returned.
        vocab_size: The number of tokens the target knows, `V`.

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
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A broken file ends in whatever its parser trips over; what tokenizers' Rust
        # code ends in is no `Exception`.
        reason = first_line(error).replace(str(folder), folder.name)
        raise InputError(f"{folder} holds no usable tokenizer: {reason}") from error
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
    return tokenizer


class RefusedError(InputError):
    """A chat template refused one conversation; it may take others."""


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
) -> tuple[str, list[tuple[int, int]] | None]:
    """Renders a conversation as `tokenizer.apply_chat_template` does, within limits.

    A template is a program that came with a checkpoint. It runs in a process of its
    own, which is kept for the next conversation.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        messages: The messages, each with a `role` and its `content`.
        add_generation_prompt: Whether the text ends where the assistant begins.

    Returns:
        The text, and where in it the template's {% generation %} blocks begin and end,
        `None` if it has none.

    Raises:
        RefusedError: If the template raises an error for these messages.
        InputError: If the template is not valid, or takes too long or too much memory.
    """
    refused = "the chat template refuses the conversation"
    if not messages:
        raise RefusedError(f"{refused}: it has no message")
    try:
        template = tokenizer.get_chat_template()
        has_blocks = _GENERATION_BLOCK.search(template) is not None
        given = [{k: v for k, v in m.items() if v is not None} for m in messages]
        own = {
            "conversations": [given],
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "return_assistant_tokens_mask": has_blocks,
        }
        request = json.dumps(tokenizer.special_tokens_map | own)
    except Exception as error:
        raise RefusedError(f"{refused}: {first_line(error)}") from error
    answer = _ask_renderer(request)
    if answer.get("is_broken"):
        raise InputError(f"the chat template is no valid template: {answer['error']}")
    if "error" in answer:
        raise RefusedError(f"{refused}: {answer['error']}")
    blocks = [(start, end) for start, end in answer["blocks"]]
    return answer["text"], blocks if has_blocks else None


def _ask_renderer(request: str) -> dict[str, Any]:
    """Returns what `_RENDER` answers to a line of JSON."""
    with _RENDERER_LOCK:
        child = _renderer(os.getpid())
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(request + "\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())
        except BaseException as error:  # Ctrl-C, too: an answer may be on its way.
            _end(child)
            _renderer.cache_clear()
            if not isinstance(error, (OSError, ValueError)):
                raise
            raise InputError(
                f"the chat template is not rendered to its end: at most {_MAX_SECONDS} "
                f"s, {_MAX_MEMORY / 2**30:g} GiB and {_MAX_TEXT / 2**20:g} MiB of text "
                "are allowed; use a checkpoint with another template"
            ) from error


@functools.cache
def _renderer(process: int) -> subprocess.Popen[str]:
    """Returns the renderer of a process, which ends when its input does."""
    del process  # A fork must not write to its parent's.
    limits = f"SECONDS, MEMORY, TEXT = {_MAX_SECONDS}, {_MAX_MEMORY}, {_MAX_TEXT}"
    child = subprocess.Popen(
        # As for grammars, nothing of the current folder is imported.
        [sys.executable, "-P", "-c", limits + _RENDER],
        cwd=os.sep,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the parent.
    )
    atexit.register(_end, child)
    return child


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError), child:  # It may not have read all its input.
        child.kill()


def _tokenizer_class(folder: Path) -> Any:
    """Returns the tokenizer's class; to import all of transformers takes seconds."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if settings.get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
