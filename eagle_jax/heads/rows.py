"""Rows of text that heads learn from."""

from typing import Any

import jax
import numpy as np
from flax import struct


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
