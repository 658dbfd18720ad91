"""Rows of text that heads learn from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle_jax.config import require
from eagle_jax.errors import InputError


@struct.dataclass(kw_only=True)
class PackedRows:
    """Samples in rows of `T` tokens; NumPy arrays until a step takes them.

    Attributes:
        tokens: `[R, T]` int32, 0 where there is none.
        segments: `[R, T]` int32, the sample of its row that a token belongs to,
            counted from 1; 0 is padding, which stands at the end.
        positions: `[R, T]` int32, counted from 0 in each segment; 0 in padding.
        loss_mask: `[R, T]` bool, tokens that are to be predicted.
    """

    tokens: Any
    segments: Any
    positions: Any
    loss_mask: Any

    def __len__(self) -> int:
        """Returns the number of rows, `R`."""
        return len(self.tokens)

    def __getitem__(self, rows: slice | np.ndarray) -> "PackedRows":
        """Returns some of the rows."""
        return jax.tree.map(lambda x: x[rows], self)

    @property
    def padding(self) -> float:
        """The share of the slots that hold no token."""
        return float(np.mean(self.segments == 0))


def segment_mask(segments: jax.Array) -> jax.Array:
    """Returns the attention mask, `[B, T, T]` bool: causal inside each segment."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tri(length, dtype=bool)


def known_tokens(rows: PackedRows, config: Any) -> np.ndarray | None:
    """Returns the tokens that a new head of these sizes is to know; `None` for all.

    See `frequent_tokens`.
    """
    known = getattr(config, "draft_vocab_size", config.vocab_size)
    return frequent_tokens(rows, known, config.vocab_size)


def compared_tokens(rows: PackedRows, config: Any, loss: Any) -> np.ndarray | None:
    """Returns the tokens that a loss of these settings compares; `None` for all.

    For the rest see `frequent_tokens`; `config` are the head's sizes.
    """
    most, size = config.vocab_size, getattr(loss, "loss_vocab_size", None)
    wanted = f"at most the target's {most}"
    require(size is None or size <= most, "loss_vocab_size", size, wanted)
    return frequent_tokens(rows, size or most, most)


def frequent_tokens(rows: PackedRows, count: int, vocab_size: int) -> np.ndarray | None:
    """Returns the most frequent tokens to be predicted, `[W]` int32; `None` for all.

    Ties, and places that are left, go to the lowest ids.

    Args:
        rows: The rows to train on, `[R, T]` NumPy arrays.
        count: The number of these tokens, `W`.
        vocab_size: The number of tokens the target knows, `V`.

    Raises:
        InputError: If the rows have no token to choose by.
    """
    if count == vocab_size:
        return None
    wanted = rows.tokens[rows.loss_mask & (rows.segments > 0)]
    if not wanted.size:
        raise InputError(
            "the data have no token that is to be predicted, so a draft vocabulary "
            "cannot be counted; give data with answers"
        )
    counts = np.bincount(wanted, minlength=vocab_size)
    order = np.argsort(-counts, kind="stable").astype(np.int32)
    return np.sort(order[:count])
