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
from eagle_jax.heads.eagle import EagleHead, EagleHeadConfig
from eagle_jax.heads.eagle3.head import Eagle3Head
from eagle_jax.heads.eagle3.model import Eagle3HeadConfig
from eagle_jax.interface import Drafter, Draws, Params, Target, TargetOutput, Verified
from eagle_jax.models.cache import append_rows
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import MeshShape
from eagle_jax.processors import ProcessorConfig

if TYPE_CHECKING:
    from eagle_jax.engine.config import PairConfig
    from eagle_jax.engine.load import load_embedded_pair, load_pair
    from eagle_jax.engine.pair import Pair
    from eagle_jax.engine.request import Request
    from eagle_jax.engine.results import Generation, Piece, TokenLogprob
    from eagle_jax.engine.scheduler import Scheduler

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
    "Generation",
    "InputError",
    "LayerConfig",
    "LogprobsConfig",
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
    "Scheduler",
    "SmallModel",
    "StaticConfig",
    "StopReason",
    "SwitchConfig",
    "SwitchDrafter",
    "Target",
    "TargetOutput",
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
    "load_embedded_pair",
    "load_pair",
    "make_requests",
    "round_up_slots",
    "speculative",
]


_LATER = {
    "PairConfig": "config",
    "Generation": "results",
    "Pair": "pair",
    "Piece": "results",
    "Request": "request",
    "Scheduler": "scheduler",
    "TokenLogprob": "results",
    "load_embedded_pair": "load",
    "load_pair": "load",
}


def __getattr__(name: str) -> Any:
    """Imports what reads checkpoints when it is first asked for: it takes a while."""
    if name not in _LATER:
        raise AttributeError(f"module 'eagle_jax' has no attribute {name!r}")
    module = importlib.import_module(f"eagle_jax.engine.{_LATER[name]}")
    return getattr(module, name)
