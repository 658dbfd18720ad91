"""The tokenizer that a checkpoint carries."""

import os
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.source import first_line
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
    # Imported here: it takes seconds, and nobody who only decodes ids needs it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # A broken file ends in whatever its parser trips over.
        raise InputError(
            f"{folder} holds no usable tokenizer: {first_line(error)}"
        ) from error
    if len(tokenizer) > vocab_size:
        raise InputError(
            f"{folder}: the tokenizer knows {len(tokenizer)} ids, but the target's "
            f"embedding has {vocab_size} rows; they do not belong together"
        )
    return tokenizer
