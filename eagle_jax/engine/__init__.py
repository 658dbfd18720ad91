"""Text in, text out: pairs, their requests, and the one loop that writes texts."""

from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.engine import Engine
from eagle_jax.engine.open import load_embedded_pair, load_pair
from eagle_jax.engine.pair import Pair
from eagle_jax.engine.request import Request
from eagle_jax.engine.text import Generation, Piece, Text, TokenLogprob

__all__ = [
    "Engine",
    "Generation",
    "Pair",
    "PairConfig",
    "Piece",
    "Request",
    "Text",
    "TokenLogprob",
    "load_embedded_pair",
    "load_pair",
]
