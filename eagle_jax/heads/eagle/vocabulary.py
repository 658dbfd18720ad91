"""The tokens that a draft model chooses among, where they are fewer than the target's.

Every drafted level reads the whole output head, of which a few thousand columns draft
almost all that is accepted (FR-Spec, Zhao et al. 2025). What is drafted never changes
the text.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints.hub import VOCABULARY_FILE
from eagle_jax.config import require
from eagle_jax.drafting import DraftModel
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.parsing import parse_json, read_bytes


def read_vocabulary(
    given: str | None,
    model: DraftModel,
    *,
    folder: Path | None = None,
    vocab_size: int,
    stop_tokens: Sequence[int],
    read_tokenizer: Callable[[], Any],
) -> tuple[int, ...] | None:
    """Returns the tokens that a draft model chooses among, ascending; `None` for all.

    Args:
        given: What `PairConfig.draft_vocabulary` says.
        model: The draft model.
        folder: The model's folder, whose own vocabulary counts where none is given.
        vocab_size: The number of tokens the target knows, `V`.
        stop_tokens: The tokens that end the target's texts.
        read_tokenizer: See `Pair`; it is called only to count in a text.
    """
    is_eagle = isinstance(model, EagleHead)
    own = folder / VOCABULARY_FILE if folder is not None and is_eagle else None
    if given is None and own is not None and own.is_file():
        return _own(own, vocab_size)
    if given in (None, "none"):
        return None
    if not is_eagle:
        raise InputError(
            f"`draft_vocabulary` {given}: these heads have output heads of their own; "
            "only EAGLE-1/2 heads take a draft vocabulary"
        )
    asked = re.fullmatch("([0-9]{1,9})@(.+)", given)
    if asked is None:
        raise InputError(
            f"`draft_vocabulary` {given} must be N@FILE, for as many of the most "
            "frequent tokens of a text, or none"
        )
    size, path = int(asked[1]), Path(asked[2])
    ids = _count(path, size, read_tokenizer(), vocab_size, stop_tokens)
    return None if len(ids) == vocab_size else tuple(sorted(ids))


def _own(path: Path, vocab_size: int) -> tuple[int, ...]:
    ids = parse_json(read_bytes(path), str(path))
    are_ids = isinstance(ids, list) and all(type(id_) is int for id_ in ids)
    if not are_ids or not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(
            f"{path} must hold a list of token ids below {vocab_size}, the target's "
            "number of tokens; remove it to draft all tokens"
        )
    return tuple(sorted(set(ids)))


def _count(
    path: Path, size: int, tokenizer: Any, vocab_size: int, stop_tokens: Sequence[int]
) -> list[int]:
    """Returns `size` tokens: special ones, then those that a text has most often.

    Of those counted alike the lower come first: in most tokenizers these are the more
    frequent.
    """
    text = read_bytes(path).decode("utf-8-sig", "replace")
    ids = np.array(tokenizer(text, verbose=False).input_ids, int)
    counts = np.bincount(ids, minlength=vocab_size)[:vocab_size]
    special = [id_ for id_ in sorted(tokenizer.all_special_ids) if id_ < vocab_size]
    first = list(dict.fromkeys([*stop_tokens, *special]))
    least = max(len(first), 1)
    wanted = f"{least} (special and stop tokens) to {vocab_size} (all tokens)"
    require(least <= size <= vocab_size, "`draft_vocabulary`", size, wanted)
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, first)]
    return [*first, *others[: size - len(first)].tolist()]
