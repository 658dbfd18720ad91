"""What a process may set in JAX: texts and types stay what they are."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.processors import ProcessorConfig
from eagle_jax.testing import assert_same_tokens
from eagle_jax.tree import from_paths
from tests import tiny
from tests.drafting import test_drafters as drafters
from tests.helpers import texts

PAIR = tiny.pair(tiny.TARGET, tiny.HEAD, from_paths([(0,), (1,), (0, 0)]))
DECODER = Decoder(target=PAIR.target, drafter=PAIR.drafter)
PROMPTS = [[1, 2, 3], [4], [2, 2]]
SAMPLED: dict[str, Any] = {
    "temperature": [1.0, 0.5, 0.0],
    "top_k": [0, 3, 0],
    "seeds": range(3),
}


def decoded() -> list[list[int]]:
    """Texts whose logits are float32, whatever JAX's own types are."""
    requests = make_requests(PROMPTS, max_new_tokens=8, **SAMPLED)
    found = texts(requests, speculative.generate(DECODER, PAIR.params, requests))
    plain = texts(requests, autoregressive.generate(DECODER, PAIR.params, requests))
    assert_same_tokens(found, plain)
    return found


@pytest.fixture(scope="module")
def usual() -> list[list[int]]:
    return decoded()


@pytest.mark.parametrize(
    "setting",
    [
        jax.enable_x64(True),
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.numpy_dtype_promotion("strict"),
    ],
    ids=["64 bits", "debug_nans", "debug_infs", "strict"],
)
def test_texts_are_the_same_under_a_setting(setting: Any, usual: Any) -> None:
    with setting:
        assert_same_tokens(decoded(), usual)


# One of each kind of drafter, and of each way to draw.
@pytest.fixture(
    params=[
        ("switch", "coupled"),
        ("bush, drawn", "rejection"),
        ("chain of fewer tokens", "coupled"),
        ("medusa", "greedy"),
        ("dspark", "coupled"),
        ("small eagle2, calibrated", "coupled"),
        ("lookahead", "greedy"),
        ("recycling", "greedy"),
        ("rest", "greedy"),
    ],
    ids=lambda case: case[0],
)
def decoding(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Reads prompts and decodes texts with every penalty, from nothing."""
    name, rule = request.param
    target_params = tiny.target_params(drafters.CONFIG)
    drafter, params = drafters.make(name, target_params)
    decoder = Decoder(target=drafters.TARGET, drafter=drafter, acceptance=rule)

    def run() -> Any:
        requests = make_requests(
            PROMPTS,
            max_new_tokens=8,
            processors=ProcessorConfig(
                repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5
            ),
            temperature=0.0 if rule == "greedy" else 1.0,
        )
        state = speculative.prefill(decoder, params, requests, num_slots=64)
        return speculative.decode(decoder, params, state)

    return run


def test_nothing_is_computed_in_64_bit_floats(decoding: Callable[[], Any]) -> None:
    """In 64-bit mode a literal without a type would change sums, and so texts."""
    with jax.enable_x64(True):
        lines = str(jax.make_jaxpr(decoding)()).splitlines()
    results = [line.split(" = ")[0] for line in lines if " = " in line]
    assert results and not [result for result in results if "f64" in result]


def test_no_type_is_promoted(decoding: Callable[[], Any]) -> None:
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(decoding)  # JAX itself refuses what is.
