"""Under penalties and bans, too, every method's text is plain decoding's."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.constraints.automaton import DEAD, START, TokenAutomaton, make_tables
from eagle_jax.decoding import autoregressive, growth, slots, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import StopReason
from eagle_jax.drafting import LookupDrafter, TreeDrafter
from eagle_jax.interface import Drafter, Params
from eagle_jax.processors import ProcessorConfig
from eagle_jax.testing import ToyModel, assert_same_tokens
from tests.drafting.toy_model import NarrowToyModel
from tests.helpers import refused, texts
from tests.processed import (
    BUSH,
    EACH,
    KNOWN,
    ROOM,
    STOP,
    TARGET,
    TOY,
    VOCABULARY,
    configs_of,
    requests_of,
)

EAGLE2 = TreeConfig(num_nodes=9, depth=3, width=3)
DRAFTERS: dict[str, Drafter] = {
    "eagle2": TreeDrafter(model=ToyModel(**TOY), tree=EAGLE2),
    "eagle2, fewer tokens": TreeDrafter(
        model=NarrowToyModel(**TOY, known=KNOWN), tree=EAGLE2
    ),
    "bush": TreeDrafter(model=ToyModel(**TOY), tree=BUSH),
    "bush, drawn": TreeDrafter(model=ToyModel(**TOY), tree=BUSH, sampled=True),
    "lookup": LookupDrafter(depth=4, num_matches=2),
}


def check_lossless(
    drafter: Drafter, requests: Requests, rule: Any = "coupled", **parts: Any
) -> list[list[int]]:
    """Plain and speculative texts and their ends are the same; returns the texts."""
    params = Params(target=(), constraint=parts.pop("tables", ()))
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance=rule, **parts)
    found = speculative.generate(decoder, params, requests)
    plain = autoregressive.generate(decoder, params, requests)
    expected = texts(requests, plain)
    assert_same_tokens(texts(requests, found), expected)
    np.testing.assert_array_equal(found.stop_reason, plain.stop_reason)
    return expected


def test_processed_text_is_plain_processed_text() -> None:
    """By one drafter; `tests/drafting/test_drafters.py` has them all."""
    names = ["repetition", "ngrams", "nothing", "all"]
    found = check_lossless(DRAFTERS["eagle2"], requests_of(configs_of(names)))
    free = requests_of([ProcessorConfig()] * 4)
    plain = autoregressive.generate(Decoder(target=TARGET), Params(target=()), free)
    others = texts(free, plain)
    assert found[2] == others[2]
    assert found[0] != others[0] and found[3] != others[3]


@pytest.mark.parametrize("kind", [kind for kind in EACH if kind != "nothing"])
def test_each_processor_alone_keeps_the_text_plain(kind: str) -> None:
    requests = requests_of(configs_of([kind, "nothing", kind, kind]))
    named = [leaf is not None for leaf in vars(requests.processors).values()]
    assert sum(named) == (2 if kind == "logit_bias" else 1)  # No other is compiled.
    check_lossless(DRAFTERS["bush"], requests)


@pytest.mark.parametrize(
    "name, rule", [("bush", "greedy"), ("bush, drawn", "rejection")]
)
def test_other_rules_take_the_most_likely_processed_token(name: str, rule: Any) -> None:
    requests = requests_of(
        configs_of(["all", "ngrams", "frequency", "bad words"]), temperature=0.0
    )
    check_lossless(DRAFTERS[name], requests, rule)


def test_drafts_are_chosen_under_the_same_processing() -> None:
    requests = requests_of(
        configs_of(["all", "repetition", "ngrams", "frequency"]),
        stop_tokens=(),
        temperature=0.0,
        max_new_tokens=22,
    )
    tree = TreeConfig(num_nodes=5, depth=4, width=1)
    drafter = TreeDrafter(model=ToyModel(**TOY), tree=tree)
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance="greedy")
    params = Params(target=(), drafter=jnp.float32(1.0))  # The target itself.
    state = speculative.generate(decoder, params, requests)
    is_long = np.asarray(state.stop_reason) == StopReason.MAX_TOKENS
    assert is_long.sum() >= 3
    assert set(np.asarray(state.accept_lengths)[is_long, :4].ravel()) == {4}


def test_a_growing_cache_keeps_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "FIRST_LENGTH", 48)
    requests = requests_of(
        configs_of(["frequency", "bad words", "repetition", "nothing"]),
        max_new_tokens=120,
        stop_tokens=(),
    )
    assert len(growth.cache_sizes(requests, None, depth=3)) == 2
    check_lossless(DRAFTERS["eagle2"], requests)


def test_texts_of_any_processors_enter_a_state_with_room_for_them() -> None:
    names = [*EACH, "all"]
    requests = requests_of(configs_of(["all"] * 3), ROOM)
    decoder = Decoder(target=TARGET, drafter=DRAFTERS["eagle2"])
    params, asked = Params(target=()), []
    for number, config in enumerate(configs_of(names)):
        draws: dict[str, Any] = {"seeds": number, "temperature": float(number % 2)}
        asked.append(requests_of([config], ROOM, **draws))
    state = slots.init_decode_state(
        decoder, params, batch=3, num_slots=64, processor_room=ROOM
    )
    found: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    programs: list[Any] = [slots.prefill, slots.generate]
    before = [program._cache_size() for program in programs]
    while len(found) < len(asked) or rows:
        for row in {0, 1, 2} - rows.keys():
            if (number := len(found)) == len(asked):
                break
            prefix, first = slots.prefill(decoder, params, asked[number], num_slots=64)
            state, rows[row] = slots.insert(prefix, state, row), number
            found[number] = first.tokens[0, : int(first.counts[0])].tolist()
        state, result = slots.generate(decoder, params, state, rounds=2)
        for row, number in list(rows.items()):
            found[number] += result.tokens[row, : int(result.counts[row])].tolist()
            if result.is_finished[row]:
                del rows[row]
    added = [program._cache_size() for program in programs]
    assert [b - a for a, b in zip(before, added, strict=True)] == [1, 1]
    for number, alone in enumerate(asked):
        plain = autoregressive.generate(decoder, params, alone, num_slots=64)
        assert [found[number]] == texts(alone, plain), names[number]

    small = slots.init_decode_state(decoder, params, batch=1, num_slots=64)
    prefix, _ = slots.prefill(decoder, params, requests, num_slots=64)
    refused(lambda: slots.insert(prefix, small, 0), "processor_room")


def automaton(table: np.ndarray) -> dict[str, Any]:
    return {
        "constraint": TokenAutomaton(vocab_size=VOCABULARY),
        "tables": make_tables(table, np.arange(VOCABULARY)),
    }


@pytest.mark.parametrize("name", ["eagle2, fewer tokens", "lookup"])
def test_a_constraint_masks_what_processors_leave(name: str) -> None:
    table = np.zeros((4, VOCABULARY), np.int32)
    table[START, [0, 1, 2, 4, 6, 9]] = 2, 3, 2, 3, 2, 3
    table[2, [3, 5, 7, 8, STOP]] = 1, 1, 3, 1, 1
    table[3, [1, 2, 8]] = 2, 2, 1
    configs = configs_of(["all", "ngrams", "frequency", "nothing"])
    found = check_lossless(DRAFTERS[name], requests_of(configs), **automaton(table))
    for config, text in zip(configs, found, strict=True):
        state = START
        for token in text:
            state = table[state, token]
        assert state != DEAD and len(text) > 1
        assert len(text) >= config.min_new_tokens or text[-1] != STOP


@pytest.mark.parametrize(
    "name, rule", [("eagle2", "coupled"), ("bush, drawn", "rejection")]
)
def test_a_text_that_may_not_go_on_ends_before_any_forbidden_token(
    name: str, rule: Any
) -> None:
    """No token comes twice, so that each comes once."""
    configs = [ProcessorConfig(no_repeat_ngram_size=1)] * 4
    requests = requests_of(configs, stop_tokens=(), max_new_tokens=50)
    decoder = Decoder(target=TARGET, drafter=DRAFTERS[name], acceptance=rule)
    for library in (autoregressive, speculative):
        state = library.generate(decoder, Params(target=()), requests)
        assert state.stop_reason.tolist() == [StopReason.DEAD_END] * 4
        for row, text in enumerate(texts(requests, state)):
            prompt = requests.prompts[row, : int(requests.prompt_lengths[row])]
            assert sorted({*prompt.tolist(), *text}) == list(range(VOCABULARY))
            assert len(text) == VOCABULARY - len(set(prompt.tolist()))
    if rule == "coupled":
        check_lossless(DRAFTERS[name], requests)
    nothing = ProcessorConfig(bad_words=[[token] for token in range(VOCABULARY)])
    state = speculative.prefill(
        decoder, Params(target=()), requests_of([nothing]), num_slots=64
    )
    assert state.stop_reason.tolist() == [StopReason.DEAD_END]
    assert state.lengths.tolist() == [2]
