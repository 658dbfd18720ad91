"""Heads: what drafts from the target's own features, one folder per kind."""

from eagle_jax.heads.files import OpenHead, export_head, open_head
from eagle_jax.heads.head import Head, HeadModel
from eagle_jax.heads.kinds import HEADS, find_head, find_kind, head_of, open_whole

__all__ = [
    "HEADS",
    "Head",
    "HeadModel",
    "OpenHead",
    "export_head",
    "find_head",
    "find_kind",
    "head_of",
    "open_head",
    "open_whole",
]
