"""Caches that grow, and prompts read in chunks, change no token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, growth, speculative
from eagle_jax.decoding.chunked_prefill import prefill
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import Limits, ladder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import (
    LookupDrafter,
    RecyclingDrafter,
    SmallModel,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.interface import Drafter, Params
from eagle_jax.interface import prefill as reading
from eagle_jax.interface.prefill import PREFILL_CHUNK
from eagle_jax.models.transformer import Transformer
from eagle_jax.testing import assert_same_tokens
from eagle_jax.tree import chain
from tests import tiny
from tests.helpers import texts

SIZES = {"vocab_size": 24, "max_positions": 4096}
CONFIG = tiny.target_config(**SIZES)
TARGET = Transformer(config=CONFIG)

HEAD = EagleHead(config=tiny.head_config(**SIZES))
TREE = TreeConfig(num_nodes=5, depth=2, width=2)
DRAFTERS: dict[str, Drafter] = {
    "head": TreeDrafter(model=HEAD, tree=TREE),
    "recycling": RecyclingDrafter(vocab_size=24, tree=chain(2)),
    "switch": SwitchDrafter(
        first=LookupDrafter(depth=2),
        second=TreeDrafter(model=HEAD, tree=TREE),
        min_match=1,
    ),
}


@pytest.fixture(scope="module")
def params() -> Params:
    target = tiny.target_params(CONFIG)
    return Params(target=target, drafter=tiny.head_params(HEAD.config, target))


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(24, size=n).tolist() for n in lengths]


def requests(*lengths: int, new_tokens: int | list[int]) -> Requests:
    temperatures = [float(row % 2) for row in range(len(lengths))]
    return make_requests(
        prompts(*lengths),
        max_new_tokens=new_tokens,
        temperature=temperatures,
        seeds=list(range(len(lengths))),
    )


BATCH = requests(3, 20, new_tokens=[130, 60])


@pytest.mark.parametrize("name", ["switch", "recycling"])
def test_a_cache_that_grows_holds_the_same_text(
    monkeypatch: pytest.MonkeyPatch, params: Params, name: str
) -> None:
    asked = BATCH
    settings = (Decoder(target=TARGET, drafter=DRAFTERS[name]), params, asked)
    fixed = speculative.generate(*settings, num_slots=192)
    plain = autoregressive.generate(*settings, num_slots=192)
    monkeypatch.setattr(growth, "FIRST_LENGTH", 48)
    assert growth.cache_sizes(asked, None, depth=2) == [64, 192]
    grown = speculative.generate(*settings)
    assert_same_tokens(texts(asked, grown), texts(asked, plain))
    np.testing.assert_array_equal(grown.accept_lengths, fixed.accept_lengths)
    np.testing.assert_array_equal(grown.num_rounds, fixed.num_rounds)


@pytest.mark.parametrize("name", ["head", "plain"])
def test_rounds_are_compiled_once_for_prompts_of_any_length(
    params: Params, name: str
) -> None:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    def decode(length: int) -> int:
        asked = requests(length, new_tokens=4)
        compiled.clear()
        library = autoregressive if name == "plain" else speculative
        decoder = Decoder(target=TARGET, drafter=DRAFTERS["head"])
        library.generate(decoder, params, asked, num_slots=128)
        return len(compiled)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert decode(3) >= 2
        assert decode(20) == 1  # Of 32 tokens with their padding: another prefill.
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_plain_decoding_grows_its_cache_only_when_it_must(
    monkeypatch: pytest.MonkeyPatch, params: Params
) -> None:
    monkeypatch.setattr(growth, "FIRST_LENGTH", 48)
    decoder = Decoder(target=TARGET, acceptance="coupled")
    plain = autoregressive.generate(decoder, params, BATCH)
    assert plain.tokens.shape[1] == 192
    stops = jnp.tile(plain.tokens[:, 25:26], (1, BATCH.stop_tokens.shape[1]))
    stopped = dataclasses.replace(BATCH, stop_tokens=stops)
    early = autoregressive.generate(decoder, params, stopped)
    assert early.tokens.shape[1] == 64
    length = int(early.lengths[0])
    assert early.tokens[0, :length].tolist() == plain.tokens[0, :length].tolist()


@pytest.mark.parametrize(
    ("longest", "prompt", "sizes"),
    [
        (64, 16, [64]),
        (1088, 16, [1088]),
        (2175, 16, [2175]),
        (2176, 16, [1088, 2176]),
        (2176, 1024, [2176]),
        (140000, 16, [1088, 4160, 16448, 65600, 140000]),
        (140000, 5000, [16448, 65600, 140000]),
    ],
)
def test_caches_grow_fourfold_up_to_the_longest_text(
    longest: int, prompt: int, sizes: list[int]
) -> None:
    assert ladder(longest, prompt=prompt, depth=6) == sizes


def test_a_loop_stops_before_a_row_outgrows_its_cache(params: Params) -> None:
    drafter = DRAFTERS["head"]
    decoder = Decoder(target=TARGET, drafter=drafter)
    state = speculative.prefill(decoder, params, BATCH, num_slots=64)
    state = speculative.decode(decoder, params, state)
    assert bool(state.is_running.any())
    assert not growth.has_room(state, drafter.depth)
    longest = int(state.lengths.max())
    assert 64 - drafter.depth <= longest <= 64
    np.testing.assert_array_equal(state.target_cache.length, state.lengths - 1)


@pytest.mark.parametrize("name", ["head", "plain"])
def test_one_program_serves_any_limits(params: Params, name: str) -> None:
    decoder = Decoder(target=TARGET, drafter=DRAFTERS.get(name), acceptance="greedy")
    asked = make_requests(prompts(3, 5, 4), max_new_tokens=[12, 20, 28])
    program: Any = speculative.decode_until

    def decode(most_rounds: int, most_ended: int) -> DecodeState:
        begun = speculative.prefill(decoder, params, asked, num_slots=64)
        limits = Limits(most_rounds, most_ended)
        return program(decoder, params, begun, limits)

    compiled = program._cache_size()
    two_rounds, first_end, no_limit = decode(2, 3), decode(100, 0), decode(100, 3)
    assert program._cache_size() == compiled + 1
    assert two_rounds.num_rounds.tolist() == [2, 2, 2]
    assert first_end.is_running.tolist().count(False) == 1
    assert not no_limit.is_running.any()
    plain = autoregressive.generate(decoder, params, asked)
    assert_same_tokens(texts(asked, no_limit), texts(asked, plain))


def test_prompts_read_in_chunks_are_read_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, params: Params
) -> None:
    lengths = [1, 8, 9, 16, 17]
    asked = make_requests(prompts(*lengths), max_new_tokens=1, prompt_bucket=24)
    decoder = Decoder(target=TARGET)
    whole = prefill(decoder, params, asked, num_slots=27)
    monkeypatch.setattr(reading, "PREFILL_CHUNK", 8)
    # A rule of its own: programs are kept by decoder, and have the usual chunks.
    decoder = Decoder(target=TARGET, acceptance="greedy")
    chunks = prefill(decoder, params, asked, num_slots=27)
    np.testing.assert_array_equal(chunks.target_cache.length, lengths)
    np.testing.assert_array_equal(chunks.tokens, whole.tokens)
    for row, length in enumerate(lengths):
        jax.tree.map(
            lambda a, b, row=row, length=length: np.testing.assert_allclose(
                a[row, :, :length], b[row, :, :length], atol=1e-5
            ),
            chunks.target_cache.layers,
            whole.target_cache.layers,
        )


def test_a_long_prompt_continues_as_plain_decoding_does(params: Params) -> None:
    asked = requests(PREFILL_CHUNK + 70, 5, new_tokens=12)
    assert asked.prompts.shape[1] == 2 * PREFILL_CHUNK
    model = SmallModel(target=TARGET, vocab_size=CONFIG.vocab_size)
    drafter = TreeDrafter(model=model, tree=chain(2))
    decoder = Decoder(target=TARGET, drafter=drafter)
    both = Params(target=params.target, drafter=params.target)
    state = speculative.generate(decoder, both, asked)
    plain = autoregressive.generate(decoder, both, asked)
    assert_same_tokens(texts(asked, state), texts(asked, plain))
    # What drafts has read the whole prompt as well: it agrees with itself.
    assert int(state.accept_lengths[0, 0]) == 2
