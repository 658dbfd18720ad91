"""What a decoder refuses before anything is compiled."""

import jax.numpy as jnp
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.interface import Params
from eagle_jax.testing import ToyDrafter, ToyTarget
from tests.helpers import refused

TARGET = ToyTarget(vocab_size=8)
DRAFTER = ToyDrafter(target=TARGET, tree=TreeConfig(num_nodes=4, depth=2, width=2))
PARAMS = Params(target=(), drafter=jnp.float32(1))


def test_equal_decoders_are_one_static_argument() -> None:
    first = Decoder(target=TARGET, drafter=DRAFTER)
    assert first == Decoder(target=ToyTarget(vocab_size=8), drafter=DRAFTER)
    assert hash(first) == hash(Decoder(target=TARGET, drafter=DRAFTER))
    assert first != Decoder(target=TARGET, drafter=DRAFTER, acceptance="greedy")


def test_a_class_in_the_place_of_an_instance_is_refused() -> None:
    wrong: type = ToyDrafter
    message = refused(lambda: Decoder(target=TARGET, drafter=wrong))  # pyright: ignore
    assert message == "drafter is the class ToyDrafter; give an instance of it"


def test_a_misspelt_rule_is_refused_with_those_that_there_are() -> None:
    wrong: str = "couple"
    refused(
        lambda: Decoder(target=TARGET, acceptance=wrong),  # pyright: ignore
        *("'couple'", "'greedy'", "'coupled'", "'rejection'"),
    )


@pytest.mark.parametrize("library", [speculative, autoregressive])
def test_parameters_of_one_model_alone_are_refused(library) -> None:
    requests = make_requests([[1]], max_new_tokens=1)
    decoder = Decoder(target=TARGET, drafter=DRAFTER)
    refused(
        lambda: library.generate(decoder, {"weights": 1}, requests),
        "params is a dict",
        "Params(target=..., drafter=...)",
    )


@pytest.mark.parametrize("library", [speculative, autoregressive])
def test_greedy_acceptance_of_sampled_rows_is_refused(library) -> None:
    requests = make_requests([[1], [2]], max_new_tokens=1, temperature=[0.0, 0.5])
    decoder = Decoder(target=TARGET, drafter=DRAFTER, acceptance="greedy")
    refused(
        lambda: library.generate(decoder, PARAMS, requests),
        "acceptance = 'greedy'",
        "temperature = 0.5",
        "'coupled'",
    )


def test_rounds_without_a_drafter_are_refused() -> None:
    requests = make_requests([[1]], max_new_tokens=2)
    with pytest.raises(ValueError, match="no drafter"):
        speculative.generate(Decoder(target=TARGET), PARAMS, requests)
