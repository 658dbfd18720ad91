"""The tokenizer that a checkpoint carries."""

import os
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.source import first_line
from eagle_jax.errors import InputError
from eagle_jax.parsing import read_json

# Importing transformers advises to install torch, which tokenizers do not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Loads a tokenizer; code that a checkpoint brings along is never run.

    Args:
        folder: From `resolve`.
        vocab_size: `V` of the target.

    Returns:
        A `transformers` tokenizer.

    Raises:
        InputError: If there is none, or it knows more ids than the target.
    """
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
    if highest >= vocab_size:
        raise InputError(
            f"{folder}: the tokenizer knows ids up to {highest}, but the target's "
            f"embedding has {vocab_size} rows; they do not belong together"
        )
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """Imports no more of transformers than the folder needs: it takes seconds."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if settings.get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
