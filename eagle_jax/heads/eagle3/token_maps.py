"""The maps between the tokens of an EAGLE-3 head and those of its target, as stored."""

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.export_files import Tensors
from eagle_jax.checkpoints.weights import Weights
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle3.model import Eagle3HeadConfig


def token_maps(config: Eagle3HeadConfig, offsets: jax.Array | None) -> Tensors:
    """Returns `d2t`, `[W]` int64, and `t2d`, `[V]` bool, by name.

    Args:
        config: The head's sizes.
        offsets: `[W]` integers, how much higher each token is in the target's
            vocabulary; `None` where both vocabularies are the same, which have no maps.

    Raises:
        InputError: If they do not lead to ascending tokens of the target.
    """
    is_same = config.draft_vocab_size == config.vocab_size
    if offsets is None and is_same:
        return {}
    given = None if offsets is None else np.asarray(offsets)
    tokens = _check_offsets("the head", given, config)
    to_target, to_head = names.MAPS
    if is_same:
        return {}
    return {
        to_target: tokens - np.arange(len(tokens)),
        to_head: _is_known(tokens, config),
    }


def read_offsets(files: Weights, config: Eagle3HeadConfig) -> jax.Array | None:
    """Returns `d2t`, `[W]` int32, or `None` where both vocabularies are the same.

    Neither tensor is left in `files`.

    Args:
        files: The head's files.
        config: The head's sizes.

    Raises:
        InputError: If `d2t` is missing, does not fit the sizes, or does not name the
            tokens that `t2d` does.
    """
    num_known = config.draft_vocab_size
    found = {name: files.read(name) for name in names.MAPS if name in files.names()}
    for name in found:
        files.forget(name)
    offsets, is_known = (found.get(name) for name in names.MAPS)
    if offsets is None and num_known == config.vocab_size:
        offsets = np.zeros(num_known, np.int64)
    tokens = _check_offsets(str(files.folder), offsets, config)
    in_head = _is_known(tokens, config)
    if is_known is not None and not np.array_equal(is_known.astype(bool), in_head):
        raise InputError(
            f"{files.folder}: d2t and t2d name different tokens; the checkpoint is "
            "damaged"
        )
    same = num_known == config.vocab_size
    return None if same else jnp.asarray(tokens - np.arange(num_known), jnp.int32)


def _check_offsets(
    where: str, offsets: np.ndarray | None, config: Eagle3HeadConfig
) -> np.ndarray:
    """Returns the target's id of each token, `[W]` int64, or refuses the map."""
    num_known, vocab_size = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        raise InputError(
            f"{where} lacks d2t, which says where the head's {num_known} tokens stand "
            f"among the target's {vocab_size}"
        )
    if offsets.shape != (num_known,) or offsets.dtype.kind not in "iu":
        raise InputError(
            f"{where}: d2t holds {offsets.dtype} {offsets.shape}, no integer for each "
            f"of draft_vocab_size = {num_known} tokens"
        )
    tokens = np.arange(num_known) + offsets.astype(np.int64)
    if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
        raise InputError(
            f"{where}: d2t must lead to ascending tokens of the target, 0 to "
            f"{vocab_size - 1}; it holds offsets, not tokens"
        )
    return tokens


def _is_known(tokens: np.ndarray, config: Eagle3HeadConfig) -> np.ndarray:
    """Returns whether the head has each token of the target, `[V]` bool."""
    return np.isin(np.arange(config.vocab_size), tokens)
