"""Drafters: all that propose a tree, each behind the `Drafter` protocol."""

from eagle_jax.drafting.calibration import Calibration, Confidence
from eagle_jax.drafting.eagle import (
    Eagle3DrafterParams,
    Eagle3Head,
    EagleDrafterParams,
    EagleHead,
    EagleState,
)
from eagle_jax.drafting.hydra import (
    HydraDrafterParams,
    HydraHeads,
    PrefixHydraHeads,
)
from eagle_jax.drafting.lookahead import LookaheadDrafter, LookaheadState
from eagle_jax.drafting.lookup import LookupDrafter, LookupState
from eagle_jax.drafting.medusa import MedusaDrafterParams, MedusaHeads
from eagle_jax.drafting.model import DraftModel
from eagle_jax.drafting.recycling import RecyclingDrafter, RecyclingState
from eagle_jax.drafting.small_model import SmallModel, SmallModelState
from eagle_jax.drafting.switch import SwitchDrafter, SwitchState, find_tree_drafter
from eagle_jax.drafting.trees import TreeDrafter

__all__ = [
    "Calibration",
    "Confidence",
    "DraftModel",
    "Eagle3DrafterParams",
    "Eagle3Head",
    "EagleDrafterParams",
    "EagleHead",
    "EagleState",
    "HydraDrafterParams",
    "HydraHeads",
    "LookaheadDrafter",
    "LookaheadState",
    "LookupDrafter",
    "LookupState",
    "MedusaDrafterParams",
    "MedusaHeads",
    "PrefixHydraHeads",
    "RecyclingDrafter",
    "RecyclingState",
    "SmallModel",
    "SmallModelState",
    "SwitchDrafter",
    "SwitchState",
    "TreeDrafter",
    "find_tree_drafter",
]
