"""One trace and one program per shape."""

from typing import Any

import chex
import jax
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import AcceptanceRule, Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.interface import Params
from tests import tiny

NUM_SLOTS, VOCABULARY = 192, 320  # Sizes that no weight and no tree has.


def make_pair() -> tiny.Pair:
    return tiny.pair(
        tiny.target_config(vocab_size=VOCABULARY),
        tiny.head_config(vocab_size=VOCABULARY),
        TreeConfig(num_nodes=12, depth=3, width=4),
    )


def requests_like(variant: int, rule: AcceptanceRule = "coupled") -> Requests:
    """Two rows whose every value depends on the variant, and no shape."""
    return make_requests(
        [[1 + variant] * (3 + variant), [7]],
        max_new_tokens=[4 + 3 * variant, 9 - variant],
        max_length=40 + variant,
        temperature=0.0 if rule == "greedy" else 0.5 + variant,
        top_p=1.0 - 0.2 * variant,
        top_k=4 * variant,
        seeds=[variant, 10 + variant],
        stop_tokens=[variant] * variant,
    )


@pytest.fixture(scope="module")
def pair() -> tiny.Pair:
    return make_pair()


@pytest.fixture(scope="module")
def compilations() -> list[str]:
    """Grows with every program that XLA compiles."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return events


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_other_values_compile_nothing(
    pair: tiny.Pair, compilations: list[str], rule: AcceptanceRule
) -> None:
    def run(variant: int) -> None:
        requests = requests_like(variant, rule)
        decoder = Decoder(target=pair.target, drafter=pair.drafter, acceptance=rule)
        state = speculative.generate(
            decoder, pair.params, requests, num_slots=NUM_SLOTS
        )
        plain = autoregressive.generate(decoder, pair.params, requests)
        jax.block_until_ready((state, plain))

    run(0)
    compilations.clear()
    run(1)
    assert compilations == []
    jax.jit(lambda x: x + 12345)(1)  # The listener does listen.
    assert compilations != []


def test_generation_is_traced_once(pair: tiny.Pair) -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params: Params, requests: Any) -> DecodeState:
        return speculative.generate(
            Decoder(target=pair.target, drafter=pair.drafter),
            params,
            requests,
            num_slots=NUM_SLOTS,
        )

    for variant in range(3):
        run(pair.params, requests_like(variant))
