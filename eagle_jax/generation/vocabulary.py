"""The tokens that a draft model chooses among, where they are fewer than the target's.

Every drafted level reads the whole output head, of which a few thousand columns draft
almost all that is accepted (FR-Spec, Zhao et al. 2025). What is drafted never changes
the text. The file beside a draft model names its tokens; other keys say where they come
from:

    {"vocab_size": 2048, "tokenizer": "9c56cc51b374c3ba", "ids": [2, 0, 198, 13, ...]}

The ids stand in the order of their worth: special tokens, then those counted most. A
file without the tokenizer's fingerprint is taken for the target's.
"""

import hashlib
import json
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
from eagle_jax.parsing import read_json

_COUNT = "count one with eagle-jax count-tokens"


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
        read_tokenizer: See `PairSource`; it is called only for a file that names its
            tokenizer. `None` for a target without one.

    Returns:
        The tokens in ascending order, `None` for all.

    Raises:
        InputError: If there is no such file, it is of another tokenizer, its tokens
            cannot be used, are fewer than were asked for or lack a stop token, or if
            the draft model has an output head of its own.
    """
    own = None if folder is None else folder / VOCABULARY_FILE
    has_own = own is not None and own.is_file()
    if given == "none" or (given is None and not has_own):
        return None
    count = None if given is None else _read_count(given)
    if not isinstance(model, EagleHead | SmallModel):
        if given is None:
            return None
        raise InputError(
            f"`draft_vocabulary` {given}: these heads have output heads of their own; "
            "only EAGLE-1/2 heads and small models take a draft vocabulary"
        )
    if count is not None and not has_own:
        place = "the draft has no folder" if own is None else f"there is no {own}"
        raise InputError(
            f"`draft_vocabulary` {count} takes the most frequent tokens of a file, but "
            f"{place}; {_COUNT}"
        )
    path = own if given is None or count is not None else Path(str(given))
    assert path is not None
    ids = _read_ids(path, vocab_size, read_tokenizer)
    if count is not None:
        wanted = f"1 to {len(ids)}, the tokens of {path}"
        require(1 <= count <= len(ids), "`draft_vocabulary`", count, wanted)
        ids = ids[:count]
    missing = sorted(set(stop_tokens) - set(ids))
    if missing:
        raise InputError(
            f"the {len(ids)} tokens of {path} lack stop token {missing[0]}, so that no "
            f"end of a text would be drafted; give more, or {_COUNT}"
        )
    return None if len(ids) == vocab_size else tuple(sorted(ids))


def _read_count(given: str | int) -> int | None:
    """Returns how many tokens a setting asks for; `None` for a file's name."""
    try:
        count = int(given)
    except ValueError:
        count = None
    wanted = "a whole number from 1, a file of eagle-jax count-tokens, or none"
    holds = given != "" and (count is None or count >= 1)
    require(holds, "`draft_vocabulary`", given if given != "" else "''", wanted)
    return count


def _read_ids(
    path: Path,
    vocab_size: int,
    read_tokenizer: Callable[[], Any] | None,
) -> list[int]:
    """Returns the ids of a file, in its order."""
    content = read_json(path)
    ids, found = content.get("ids"), content.get("vocab_size")
    are_ids = isinstance(ids, list) and all(type(one) is int for one in ids)
    if not are_ids or type(found) is not int:
        raise InputError(
            f'{path} must hold "vocab_size" and "ids", a list of token ids, as '
            "eagle-jax count-tokens writes it"
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
    known = content.get("tokenizer")
    if known is None or read_tokenizer is None:
        return ids
    if known != _fingerprint(read_tokenizer()):
        raise InputError(
            f"{path} was counted with another tokenizer than the target's, though "
            f"both know {vocab_size} tokens; {_COUNT}"
        )
    return ids


def _fingerprint(tokenizer: Any) -> str:
    """Returns 16 hexadecimal digits for a tokenizer's tokens and their ids."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]


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


def most_frequent(
    counts: np.ndarray, first: Sequence[int], size: int | None = None
) -> list[int]:
    """Returns the tokens of a draft vocabulary in the order of their worth.

    Args:
        counts: `[V]` integers, how often each token was counted. Of those counted alike
            the lower come first: in most tokenizers these are the more frequent.
        first: The tokens that are always in it, special ones and stop tokens.
        size: The number of tokens, `W`; `None` for a quarter of the vocabulary.

    Raises:
        InputError: If there is no room for the first, one of them is no token of the
            target, or there are not as many tokens.
    """
    always = list(dict.fromkeys(first))
    if max(always, default=0) >= len(counts):
        raise InputError(
            f"the stop token {max(always)} is not among the target's {len(counts)} "
            "tokens; correct its generation_config.json"
        )
    size = max(len(counts) // 4, len(always)) if size is None else size
    wanted = (
        f"{max(len(always), 1)} (special and stop tokens) to {len(counts)} (all tokens)"
    )
    require(max(len(always), 1) <= size <= len(counts), "`size`", size, wanted)
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, always)]
    return [*always, *others[: size - len(always)].tolist()]


def vocabulary_file(
    ids: Sequence[int], counts: np.ndarray, source: list[str], tokenizer: Any
) -> str:
    """Returns the text of a draft vocabulary's file.

    Args:
        ids: The tokens, from `most_frequent`.
        counts: `[V]` integers, how often each token was counted.
        source: The names of what was counted; `[]` for the tokenizer's own order.
        tokenizer: The target's `transformers` tokenizer.
    """
    content = {
        "vocab_size": len(counts),
        "tokenizer": _fingerprint(tokenizer),
        "source": source,
        "counted": int(counts.sum()),
        "covered": int(counts[list(ids)].sum()),
        "ids": list(ids),
    }
    return json.dumps(content) + "\n"
