"""The tokens that a draft model chooses among, where they are fewer than the target's.

Every drafted level reads the whole output head, of which a few thousand columns draft
almost all that is accepted (FR-Spec, Zhao et al. 2025). What is drafted never changes
the text. Its tokens are counted in a text, or named in a file, which may lie beside the
draft model:

    {"vocab_size": 2048, "ids": [2, 0, 198, 13, ...]}

The ids stand in the order of their worth: special tokens, then the most frequent.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.hub import VOCABULARY_FILE
from eagle_jax.config import require
from eagle_jax.drafting import DraftModel, EagleHead, SmallModel
from eagle_jax.errors import InputError
from eagle_jax.generation.shardings import model_sharding
from eagle_jax.parallel import PairSharding
from eagle_jax.parallel.mesh import TENSOR
from eagle_jax.parsing import read_bytes, read_json

_COUNT = "count the tokens of a text with `draft_vocabulary` N@FILE"


def read_vocabulary(
    given: str | int | None,
    model: DraftModel,
    folder: Path | None,
    *,
    vocab_size: int,
    stop_tokens: Sequence[int],
    read_tokenizer: Callable[[], Any] | None = None,
) -> tuple[int, ...] | None:
    """Returns the tokens that a draft model is to choose among.

    Args:
        given: What `DecodingConfig.draft_vocabulary` says.
        model: The draft model.
        folder: The draft model's folder, which may hold a file; `None` for none.
        vocab_size: The number of tokens the target knows, `V`.
        stop_tokens: The tokens that end the target's texts.
        read_tokenizer: See `PairSource`; it is called only to count in a text. `None`
            for a target without a tokenizer.

    Returns:
        The tokens in ascending order, `None` for all.

    Raises:
        InputError: If there is no such file, its tokens cannot be used, are fewer than
            were asked for or lack a stop token, or if the draft model has an output
            head of its own.
    """
    own = None if folder is None else folder / VOCABULARY_FILE
    has_own = own is not None and own.is_file()
    if given == "none" or (given is None and not has_own):
        return None
    count, source = (None, None) if given is None else _parse(given)
    if not isinstance(model, EagleHead | SmallModel):
        if given is None:
            return None
        raise InputError(
            f"`draft_vocabulary` {given}: these heads have output heads of their own; "
            "only EAGLE-1/2 heads and small models take a draft vocabulary"
        )
    if source is None and not has_own:
        place = "the draft has no folder" if own is None else f"there is no {own}"
        raise InputError(
            f"`draft_vocabulary` {count} takes the first tokens of a file, but "
            f"{place}; {_COUNT}"
        )
    path = source or own
    assert path is not None
    if source is not None and count is not None:
        if read_tokenizer is None:
            raise InputError(
                f"`draft_vocabulary` {given}: there is no tokenizer to count the "
                "tokens of a text with; give a file of ids"
            )
        tokenizer = read_tokenizer()
        ids = most_frequent(source, count, tokenizer, vocab_size, stop_tokens)
    else:
        ids = _read_ids(path, vocab_size)
        wanted = f"1 to {len(ids)}, the tokens of {path}"
        count = len(ids) if count is None else count
        require(1 <= count <= len(ids), "`draft_vocabulary`", count, wanted)
        ids = ids[:count]
    missing = sorted(set(stop_tokens) - set(ids))
    if missing:
        raise InputError(
            f"the {len(ids)} tokens of {path} lack stop token {missing[0]}, so that no "
            f"end of a text would be drafted; give more, or {_COUNT}"
        )
    return None if len(ids) == vocab_size else tuple(sorted(ids))


def _parse(given: str | int) -> tuple[int | None, Path | None]:
    """Returns how many tokens a setting asks for, and of which file, each if any."""
    number, _, text = str(given).partition("@")
    try:
        count, file = int(number), text
    except ValueError:
        count, file = None, str(given)
    wanted = "a whole number from 1, alone or as N@FILE, a file of ids, or none"
    holds = given != "" and (count is None or count >= 1)
    require(holds, "`draft_vocabulary`", given if given != "" else "''", wanted)
    return count, Path(file) if file else None


def most_frequent(
    path: Path,
    size: int,
    tokenizer: Any,
    vocab_size: int,
    stop_tokens: Sequence[int],
) -> list[int]:
    """Counts the tokens of a text, and returns some in the order of their worth.

    Args:
        path: The file of the text.
        size: The number of tokens, `W`.
        tokenizer: The target's `transformers` tokenizer.
        vocab_size: The number of tokens the target knows, `V`.
        stop_tokens: The tokens that end the target's texts, which come first with the
            tokenizer's special ones. Of those counted alike the lower come first: in
            most tokenizers these are the more frequent.

    Raises:
        InputError: If the text cannot be read, or there is no room for the first
            tokens.
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
    ids, found = content.get("ids"), content.get("vocab_size")
    are_ids = isinstance(ids, list) and all(type(one) is int for one in ids)
    if not are_ids or type(found) is not int:
        raise InputError(
            f'{path} must hold "vocab_size" and "ids", a list of token ids; {_COUNT}'
        )
    assert isinstance(ids, list)
    if found != vocab_size:
        raise InputError(
            f"{path} was counted in a vocabulary of {found} tokens, and the target has "
            f"{vocab_size}; {_COUNT}"
        )
    if not ids:
        raise InputError(f"{path} names no token at all; {_COUNT}")
    strange = next((one for one in ids if not 0 <= one < vocab_size), None)
    if strange is not None:
        raise InputError(
            f"{path} names token {strange}, but the target's are 0 to "
            f"{vocab_size - 1}; {_COUNT}"
        )
    if len(set(ids)) < len(ids):
        seen = set[int]()
        again = next(one for one in ids if one in seen or seen.add(one))
        raise InputError(f"{path} names token {again} twice; {_COUNT}")
    return ids


def narrow(
    model: DraftModel,
    params: Any,
    tokens: tuple[int, ...] | None,
    sharding: PairSharding | None = None,
) -> Any:
    """Returns a draft model's weights with the columns of some tokens alone.

    A warning says if the devices cannot share them as they share the whole model.

    Args:
        model: The draft model, for which `read_vocabulary` found the tokens.
        params: Its weights; what stays the same is not copied.
        tokens: The tokens; `None` for all.
        sharding: The target's sharding; `None` for the default device.
    """
    if tokens is None:
        return params
    assert isinstance(model, EagleHead | SmallModel)
    narrowed = model.narrow(params, jnp.asarray(tokens, jnp.int32))
    if sharding is None:
        return narrowed
    spread = model_sharding(sharding, model, narrowed)
    if spread.drafter != model_sharding(sharding, model, params).drafter:
        parts = math.prod(sharding.mesh.shape[axis] for axis in TENSOR)
        warnings.warn(
            f"a draft vocabulary of {len(tokens)} tokens cannot be split over "
            f"tensor = {parts} devices, so each holds the whole draft model; take a "
            f"multiple of {parts}",
            stacklevel=2,
        )
    places = spread.drafter_shardings(narrowed)
    kept = {id(leaf) for leaf in jax.tree.leaves(params)}
    return jax.tree.map(
        lambda leaf, place: leaf if id(leaf) in kept else jax.device_put(leaf, place),
        narrowed,
        places,
    )
