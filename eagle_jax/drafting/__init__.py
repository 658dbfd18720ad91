"""Whatever proposes a tree, each behind the `Drafter` protocol."""

from eagle_jax.drafting.eagle import EagleDrafter, EagleDrafterParams, EagleState

__all__ = ["EagleDrafter", "EagleDrafterParams", "EagleState"]
