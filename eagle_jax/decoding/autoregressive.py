"""Plain decoding, one token per pass: the baseline, and the judge of every method.

It reads a decoder's target and whether the decoder is greedy, and the target's
parameters alone: the decoder that is judged can be its own judge.
"""

import dataclasses

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.interface import Params


def generate(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    num_slots: int | None = None,
    num_samples: int = 1,
) -> DecodeState:
    """Decodes every request to its end, token by token.

    Arguments, results and errors are those of `speculative.generate`; the drafter and
    its parameters are not used.
    """
    plain = dataclasses.replace(decoder, drafter=None)
    return speculative.generate(
        plain, params, requests, num_slots=num_slots, num_samples=num_samples
    )
