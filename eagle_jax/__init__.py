"""EAGLE-2 speculative decoding for JAX: the whole generation as one program.

Text in, text out: `load_pair` and `load_embedded_pair`. Around your own model:
`Decoder`, `generate` and the seams of `eagle_jax.interface`; the algorithm on one tree
is in `eagle_jax.tree`, the loop in `eagle_jax.decoding.speculative`, and what helps to
test it all in `eagle_jax.testing`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from eagle_jax.config import ChainConfig, StaticConfig, TreeConfig
from eagle_jax.constraints import Constraint
from eagle_jax.constraints.automaton import TokenAutomaton
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import AcceptanceRule, Decoder
from eagle_jax.decoding.logprobs import LogprobsConfig
from eagle_jax.decoding.requests import (
    Requests,
    cache_slots,
    make_requests,
    round_up_slots,
)
from eagle_jax.decoding.speculative import generate
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.drafting import (
    DraftModel,
    LookaheadConfig,
    LookaheadDrafter,
    LookupConfig,
    LookupDrafter,
    RecyclingConfig,
    RecyclingDrafter,
    SmallModel,
    SwitchConfig,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.errors import InputError
from eagle_jax.files import keep_compiled_programs
from eagle_jax.heads.eagle import EagleHead, EagleHeadConfig
from eagle_jax.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle_jax.interface import Drafter, Draws, Params, Target, TargetOutput, Verified
from eagle_jax.models.cache import append_rows
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import MeshShape
from eagle_jax.processors import ProcessorConfig

if TYPE_CHECKING:
    from eagle_jax.engine import (
        Engine,
        Generation,
        Pair,
        PairConfig,
        Piece,
        Request,
        Text,
        TokenLogprob,
        load_embedded_pair,
        load_pair,
    )

__version__ = "0.1.0"

__all__ = [
    "AcceptanceRule",
    "ChainConfig",
    "Constraint",
    "DecodeState",
    "Decoder",
    "DraftModel",
    "Drafter",
    "Draws",
    "Eagle3Head",
    "Eagle3HeadConfig",
    "EagleHead",
    "EagleHeadConfig",
    "Engine",
    "Generation",
    "InputError",
    "LayerConfig",
    "LogprobsConfig",
    "LookaheadConfig",
    "LookaheadDrafter",
    "LookupConfig",
    "LookupDrafter",
    "MeshShape",
    "Pair",
    "PairConfig",
    "Params",
    "Piece",
    "ProcessorConfig",
    "RecyclingConfig",
    "RecyclingDrafter",
    "Request",
    "Requests",
    "RopeConfig",
    "SmallModel",
    "StaticConfig",
    "StopReason",
    "SwitchConfig",
    "SwitchDrafter",
    "Target",
    "TargetOutput",
    "Text",
    "TokenAutomaton",
    "TokenLogprob",
    "Transformer",
    "TransformerConfig",
    "TreeConfig",
    "TreeDrafter",
    "Verified",
    "append_rows",
    "autoregressive",
    "cache_slots",
    "generate",
    "keep_compiled_programs",
    "load_embedded_pair",
    "load_pair",
    "make_requests",
    "round_up_slots",
    "speculative",
]


def __getattr__(name: str) -> Any:
    """Imports what reads checkpoints when it is first asked for: it takes a while."""
    if name not in __all__:
        raise AttributeError(f"module 'eagle_jax' has no attribute {name!r}")
    return getattr(importlib.import_module("eagle_jax.engine"), name)
