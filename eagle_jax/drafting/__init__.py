"""Drafters: all that propose a tree, each behind the `Drafter` protocol."""

from eagle_jax.drafting.calibration import Calibration, Confidence
from eagle_jax.drafting.lookahead import LookaheadConfig, LookaheadDrafter
from eagle_jax.drafting.lookup import LookupConfig, LookupDrafter
from eagle_jax.drafting.model import DraftModel
from eagle_jax.drafting.recycling import RecyclingConfig, RecyclingDrafter
from eagle_jax.drafting.root_only import RootOnly
from eagle_jax.drafting.small_model import SmallModel
from eagle_jax.drafting.switch import SwitchConfig, SwitchDrafter, find_tree_drafter
from eagle_jax.drafting.trees import TreeDrafter

__all__ = [
    "Calibration",
    "Confidence",
    "DraftModel",
    "LookaheadConfig",
    "LookaheadDrafter",
    "LookupConfig",
    "LookupDrafter",
    "RecyclingConfig",
    "RecyclingDrafter",
    "RootOnly",
    "SmallModel",
    "SwitchConfig",
    "SwitchDrafter",
    "TreeDrafter",
    "find_tree_drafter",
]
