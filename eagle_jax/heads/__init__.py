"""Heads: what drafts from the target's own features, one module per kind."""

from eagle_jax.heads.files import (
    HEADS,
    OpenHead,
    export_head,
    find_head,
    open_head,
    open_whole,
)
from eagle_jax.heads.head import Head

__all__ = [
    "HEADS",
    "Head",
    "OpenHead",
    "export_head",
    "find_head",
    "open_head",
    "open_whole",
]
