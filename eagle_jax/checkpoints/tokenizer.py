"""The tokenizer that a checkpoint carries."""

import os
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.source import first_line, read_json
from eagle_jax.errors import InputError

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
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # A broken file ends in whatever its parser trips over.
        raise InputError(
            f"{folder} holds no usable tokenizer: {first_line(error)}"
        ) from error
    # Without its files, transformers makes up a tokenizer of special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(
            f"{folder} holds no usable tokenizer: there is no vocabulary, such as "
            "tokenizer.json or tokenizer.model; copy the tokenizer's files there"
        )
    if len(tokenizer) > vocab_size:
        raise InputError(
            f"{folder}: the tokenizer knows {len(tokenizer)} ids, but the target's "
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
