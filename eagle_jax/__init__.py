"""EAGLE-2 speculative decoding for JAX: the whole generation as one program.

The algorithm on one tree is in `eagle_jax.tree`, the loop in
`eagle_jax.decoding.speculative`, the seams that other stacks implement in
`eagle_jax.interface`, and what helps to test them in `eagle_jax.testing`.
"""

from eagle_jax.config import SamplingConfig, TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.drafting import Eagle3Head, EagleHead, TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter, Params, Target, TargetOutput
from eagle_jax.models.transformer import Transformer

__all__ = [
    "DecodeState",
    "Drafter",
    "Eagle3Head",
    "EagleHead",
    "InputError",
    "Params",
    "Requests",
    "SamplingConfig",
    "StopReason",
    "Target",
    "TargetOutput",
    "Transformer",
    "TreeConfig",
    "TreeDrafter",
    "autoregressive",
    "make_requests",
    "speculative",
]
