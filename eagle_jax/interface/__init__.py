"""What a target and a drafter must bring, how they are called, and its checks."""

from eagle_jax.interface.protocols import (
    Cache,
    Drafter,
    DraftingTarget,
    Draws,
    Entries,
    Params,
    PromptChunk,
    Target,
    TargetOutput,
    Truncating,
    Verified,
)

__all__ = [
    "Cache",
    "Drafter",
    "DraftingTarget",
    "Draws",
    "Entries",
    "Params",
    "PromptChunk",
    "Target",
    "TargetOutput",
    "Truncating",
    "Verified",
]
