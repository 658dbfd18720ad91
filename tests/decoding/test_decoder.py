# What breaks the protocols is the subject here, so types may not forbid it.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
"""What a decoder refuses before anything is compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.interface import Params, TargetOutput
from eagle_jax.testing import ToyDrafter, ToyTarget
from eagle_jax.testing.toys import ToyCache
from eagle_jax.tree import DraftTree
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
    wrong: Any = ToyDrafter
    message = refused(lambda: Decoder(target=TARGET, drafter=wrong))
    assert message == "drafter is the class ToyDrafter; give an instance of it"


@dataclasses.dataclass
class Mutable:
    """Not frozen, so it has no hash."""


@dataclasses.dataclass(frozen=True)
class Weighted(ToyTarget):
    weights: Any = None


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (
            Mutable(),
            "target is a Mutable that has no hash (unhashable type: 'Mutable')",
        ),
        (
            Weighted(weights=[1]),
            "a Weighted that has no hash (unhashable type: 'list')",
        ),
    ],
)
def test_a_target_without_a_hash_is_refused(target: Any, named: str) -> None:
    refused(
        lambda: Decoder(target=target),
        *(named, "frozen=True", "arrays belong into Params"),
    )


def test_a_misspelt_rule_is_refused_with_those_that_there_are() -> None:
    wrong: Any = "couple"
    refused(
        lambda: Decoder(target=TARGET, acceptance=wrong),
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


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "typical"])
def test_rounds_without_a_drafter_are_steps_of_plain_decoding(rule: Any) -> None:
    temperature = 0.0 if rule == "greedy" else 0.7
    requests = make_requests(
        [[1], [2, 3]], max_new_tokens=9, temperature=temperature, seeds=[1, 2]
    )
    decoder = Decoder(target=TARGET, acceptance=rule)
    found = speculative.generate(decoder, PARAMS, requests)
    expected = autoregressive.generate(decoder, PARAMS, requests)
    jax.tree.map(np.testing.assert_array_equal, found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.num_rounds, expected.num_rounds)


class OneFeature(ToyTarget):
    def forward(self, *arguments: Any, **named: Any) -> TargetOutput:
        output = super().forward(*arguments, **named)
        return dataclasses.replace(output, features=output.features[:, 0])


class OneHidden(ToyTarget):
    def forward(self, *arguments: Any, **named: Any) -> TargetOutput:
        output = super().forward(*arguments, **named)
        return dataclasses.replace(output, hidden=output.hidden[:, :1])


class NoVocabulary(ToyTarget):
    def unembed(self, *arguments: Any, **named: Any) -> jax.Array:
        return super().unembed(*arguments, **named).max(axis=-1)


class HalfLogits(ToyTarget):
    def unembed(self, *arguments: Any, **named: Any) -> jax.Array:
        return super().unembed(*arguments, **named).astype(jnp.bfloat16)


class ShrinkingCache(ToyTarget):
    def commit(self, *arguments: Any, **named: Any) -> ToyCache:
        cache = super().commit(*arguments, **named)
        return dataclasses.replace(cache, codes=cache.codes[:, 1:])


class AnotherCache(ToyTarget):
    def commit(self, *arguments: Any, **named: Any) -> Any:
        return {"cache": super().commit(*arguments, **named)}


class Pairs(ToyTarget):
    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = super().forward(*arguments, **named)
        return output.hidden, output.entries


class SlotsFirst(ToyTarget):
    def init_cache(self, batch: int, capacity: int) -> ToyCache:
        cache = super().init_cache(batch, capacity)
        return dataclasses.replace(cache, codes=cache.codes.T)


@pytest.mark.parametrize("library", [speculative, autoregressive])
@pytest.mark.parametrize(
    ("target", "named"),
    [
        (
            OneFeature(),
            ("OneFeature.forward", "features of shape [1, 1]", ", any]"),
        ),
        (OneHidden(), ("OneHidden.forward", "hidden of shape [1, 1, 1]")),
        (NoVocabulary(), ("NoVocabulary.unembed", "logits of shape [1]", "[1, any]")),
        (HalfLogits(), ("HalfLogits.unembed", "[1, 8] bfloat16", "float32")),
        (
            ShrinkingCache(),
            ("ShrinkingCache.commit returns .codes", "it changes no shape"),
        ),
        (AnotherCache(), ("AnotherCache.commit returns the pytree", "ToyCache")),
        (Pairs(), ("Pairs.forward returns a tuple", "TargetOutput(hidden=")),
        (
            SlotsFirst(),
            ("SlotsFirst.init_cache returns .codes of shape [", "the batch of 1"),
        ),
    ],
)
def test_a_target_that_breaks_the_protocol_is_named(library, target, named) -> None:
    requests = make_requests([[1, 2]], max_new_tokens=1)
    decoder = Decoder(target=target, drafter=DRAFTER)
    refused(lambda: library.generate(decoder, PARAMS, requests), *named)


class LongValues(ToyDrafter):
    def propose(self, *arguments: Any, **named: Any) -> tuple[DraftTree, Any]:
        tree, state = super().propose(*arguments, **named)
        longer = jnp.pad(tree.log_values, ((0, 0), (0, 1)))
        return dataclasses.replace(tree, log_values=longer), state


class FewerAfterPrefill(ToyDrafter):
    def prefill_chunk(self, *arguments: Any, **named: Any) -> Any:
        return super().prefill_chunk(*arguments, **named).length


class LongerAfterRound(ToyDrafter):
    def advance(self, *arguments: Any, **named: Any) -> Any:
        state = super().advance(*arguments, **named)
        return dataclasses.replace(state, length=state.length[:, None])


class OneForAll(ToyDrafter):
    def init_state(self, batch: int, capacity: int) -> Any:
        state = super().init_state(batch, capacity)
        return dataclasses.replace(state, length=state.length[0])


@pytest.mark.parametrize(
    ("drafter", "named"),
    [
        (FewerAfterPrefill, ("FewerAfterPrefill.prefill_chunk returns the pytree",)),
        (
            LongerAfterRound,
            ("LongerAfterRound.advance returns .length of shape [1, 1]", "given [1]"),
        ),
        (OneForAll, ("OneForAll.init_state returns .length of shape []", "batch of 1")),
    ],
)
def test_a_drafter_whose_state_does_not_fit_is_named(drafter: Any, named: Any) -> None:
    requests = make_requests([[1, 2]], max_new_tokens=2)
    decoder = Decoder(target=TARGET, drafter=drafter(target=TARGET, tree=DRAFTER.tree))
    refused(lambda: speculative.generate(decoder, PARAMS, requests), *named)


def test_a_drafter_whose_tree_does_not_fit_together_is_named() -> None:
    requests = make_requests([[1, 2]], max_new_tokens=2)
    drafter = LongValues(target=TARGET, tree=DRAFTER.tree)
    refused(
        lambda: speculative.generate(
            Decoder(target=TARGET, drafter=drafter), PARAMS, requests
        ),
        *("LongValues.propose", "log_values of shape [1, 5]", "[1, 4]"),
    )
