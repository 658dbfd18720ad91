"""Whatever proposes a tree, each behind the `Drafter` protocol."""

from eagle_jax.drafting.eagle_head import EagleHead, EagleHeadTables, EagleState
from eagle_jax.drafting.model import DraftModel
from eagle_jax.drafting.trees import TreeDrafter

__all__ = ["DraftModel", "EagleHead", "EagleHeadTables", "EagleState", "TreeDrafter"]
