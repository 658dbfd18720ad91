"""One trace and one program per shape."""

from typing import Any

import chex
import jax
import pytest

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.state import DecodeState
from eagle_jax.interface import Params
from tests.decoding.small import DRAFTER, NUM_SLOTS, TARGET, init_params, requests_like

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def params() -> Params:
    return init_params()


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
    params: Params, compilations: list[str], rule: speculative.AcceptanceRule
) -> None:
    def run(variant: int) -> None:
        requests = requests_like(variant, rule)
        decoder = Decoder(target=TARGET, drafter=DRAFTER, acceptance=rule)
        state = speculative.generate(decoder, params, requests, num_slots=NUM_SLOTS)
        plain = autoregressive.generate(decoder, params, requests)
        jax.block_until_ready((state, plain))

    run(0)
    compilations.clear()
    run(1)
    assert compilations == []
    jax.jit(lambda x: x + 12345)(1)  # The listener does listen.
    assert compilations != []


def test_generation_is_traced_once(params: Params) -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params: Params, requests: Any) -> DecodeState:
        return speculative.generate(
            Decoder(target=TARGET, drafter=DRAFTER, acceptance="coupled"),
            params,
            requests,
            num_slots=NUM_SLOTS,
        )

    for variant in range(3):
        run(params, requests_like(variant))
