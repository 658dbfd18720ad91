"""Drafters: all that propose a tree, each behind the `Drafter` protocol."""

from eagle_jax.drafting.calibration import Calibration, Confidence
from eagle_jax.drafting.lookup import LookupConfig, LookupDrafter, LookupState
from eagle_jax.drafting.model import DraftModel
from eagle_jax.drafting.recycling import (
    RecyclingConfig,
    RecyclingDrafter,
    RecyclingState,
)
from eagle_jax.drafting.small_model import SmallModel, SmallModelState
from eagle_jax.drafting.switch import (
    SwitchConfig,
    SwitchDrafter,
    SwitchState,
    find_tree_drafter,
)
from eagle_jax.drafting.trees import TreeDrafter

__all__ = [
    "Calibration",
    "Confidence",
    "DraftModel",
    "LookupConfig",
    "LookupDrafter",
    "LookupState",
    "RecyclingConfig",
    "RecyclingDrafter",
    "RecyclingState",
    "SmallModel",
    "SmallModelState",
    "SwitchConfig",
    "SwitchDrafter",
    "SwitchState",
    "TreeDrafter",
    "find_tree_drafter",
]
