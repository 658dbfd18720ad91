"""The tokens that a draft model chooses among, where they are fewer than the target's.

Every drafted level reads the whole output head, of which a few thousand columns draft
almost all that is accepted (FR-Spec, Zhao et al. 2025). What is drafted never changes
the text. Its tokens are counted in a text, or named in a file, which may lie beside the
draft model:

    {"vocab_size": 2048, "ids": [2, 0, 198, 13, ...]}

The ids stand in the order of their worth: special tokens, then the most frequent.
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
from eagle_jax.heads.eagle.draft import EagleHead
from eagle_jax.parsing import read_bytes, read_json

_HINT = "count the tokens of a text with `draft_vocabulary` N@FILE"


def read_vocabulary(
    given: str | int | None,
    model: DraftModel,
    folder: Path | None,
    *,
    vocab_size: int,
    stop_tokens: Sequence[int],
    read_tokenizer: Callable[[], Any],
) -> tuple[int, ...] | None:
    """Returns the tokens that a draft model chooses among, ascending; `None` for all.

    Args:
        given: What `DecodingConfig.draft_vocabulary` says.
        model: The draft model.
        folder: The draft model's folder, which may hold a file; `None` for none.
        vocab_size: The number of tokens the target knows, `V`.
        stop_tokens: The tokens that end the target's texts.
        read_tokenizer: See `PairSource`; it is called only to count in a text.
    """
    own = None if folder is None else folder / VOCABULARY_FILE
    path = own if own is not None and own.is_file() else None
    can_narrow = isinstance(model, EagleHead)
    if given == "none" or (given is None and not (path and can_narrow)):
        return None
    if not can_narrow:
        raise InputError(
            f"`draft_vocabulary` {given}: these heads have output heads of their own; "
            "only EAGLE-1/2 heads take a draft vocabulary"
        )
    asked = re.fullmatch("([0-9]{1,9})(?:@(.+))?", str(given))
    count = int(asked[1]) if asked else None
    if asked and count is not None and asked[2]:
        path = Path(asked[2])
        ids = _count(path, count, read_tokenizer(), vocab_size, stop_tokens)
    else:
        path = path if given is None or asked else Path(str(given))
        if path is None:
            raise InputError(
                f"`draft_vocabulary` {given} takes the first tokens of a file, but "
                f"there is no {own or VOCABULARY_FILE}; {_HINT}"
            )
        ids = _read_ids(path, vocab_size)
        wanted = f"1 to {len(ids)}, the tokens of {path}"
        require(
            count is None or 1 <= count <= len(ids), "`draft_vocabulary`", given, wanted
        )
        ids = ids[:count]
    return None if len(ids) == vocab_size else tuple(sorted(ids))


def _count(
    path: Path, size: int, tokenizer: Any, vocab_size: int, stop_tokens: Sequence[int]
) -> list[int]:
    """Returns `size` tokens: special ones, then those that a text has most often.

    Of those counted alike the lower come first: in most tokenizers these are the more
    frequent.
    """
    text = read_bytes(path).decode("utf-8", "replace")
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


def _read_ids(path: Path, vocab_size: int) -> list[int]:
    """Returns the ids of a file, in its order."""
    content = read_json(path)
    ids = content.get("ids")
    is_list = isinstance(ids, list) and all(type(one) is int for one in ids)
    fits = content.get("vocab_size") == vocab_size
    if not (
        fits and is_list and ids and len({*ids} & {*range(vocab_size)}) == len(ids)
    ):
        raise InputError(
            f'{path} must hold "vocab_size": {vocab_size}, which is the target\'s, and '
            f'"ids", different token ids of 0 to {vocab_size - 1}; {_HINT}'
        )
    return ids
