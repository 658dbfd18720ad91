"""Log-probabilities: those that a judge computes from the whole text."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, growth, slots, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.logprobs import Logprobs, LogprobsConfig
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import LookupDrafter, SwitchDrafter, TreeDrafter
from eagle_jax.interface import Drafter, Params, Target
from eagle_jax.interface import prefill as reading
from eagle_jax.processors import ProcessorConfig
from eagle_jax.testing import ToyModel, ToyTarget
from tests.constraints.test_automaton import AUTOMATON, TABLES
from tests.constraints.test_automaton import VOCABULARY as LETTERS
from tests.helpers import refused
from tests.stories import Stories, batches

TARGET = ToyTarget(vocab_size=11)
TREE = TreeConfig(num_nodes=9, depth=2, width=4)
DRAFTERS: dict[str, Drafter] = {
    "tree": TreeDrafter(model=ToyModel(vocab_size=11), tree=TREE),
    "switch": SwitchDrafter(
        first=LookupDrafter(depth=2),
        second=TreeDrafter(model=ToyModel(vocab_size=11), tree=TREE),
        min_match=2,
    ),
}
PARAMS = Params(target=(), drafter=jnp.float32(0.7))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7], [2, 2]]
CONFIG = LogprobsConfig(num_top=3, prompt=True)


def toy_decoder(
    name: str, rule: Any, config: LogprobsConfig | None = CONFIG
) -> Decoder:
    return Decoder(
        target=TARGET, drafter=DRAFTERS[name], acceptance=rule, logprobs=config
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("target",))
def read_whole(target: Target, params: Any, tokens: jax.Array) -> jax.Array:
    """The target's logits after all tokens, `[B, S, V]`, in one call."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    nothing = target.init_cache(len(tokens), 0)
    output = target.forward(params, tokens, places, None, nothing)
    return target.unembed(params, output.hidden)


def check(decoder: Decoder, params: Params, state: DecodeState) -> None:
    """Compares what a state recorded with the judge's."""
    recorded, config = state.logprobs, decoder.logprobs
    assert recorded is not None and config is not None
    logits = np.asarray(read_whole(decoder.target, params.target, state.tokens))
    for row, length in enumerate(state.lengths.tolist()):
        begin = 0 if config.prompt else int(state.rows.prompt_lengths[row]) - 1
        expected = log_softmax(logits[row, : length - 1])
        check_places(recorded, row, begin, expected, state.tokens[row])


def check_places(
    found: Logprobs, row: int, begin: int, expected: np.ndarray, tokens: Any
) -> None:
    """Compares a row's places after `begin` with log-probabilities `[places, V]`."""
    expected, num_top = expected[begin:], found.config.num_top
    places = slice(begin + 1, begin + 1 + len(expected))
    own = np.take_along_axis(expected, np.asarray(tokens)[places, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.own[row, places], own, atol=1e-4)
    top = -np.sort(-expected, axis=1)[:, :num_top]
    np.testing.assert_allclose(found.top[row, places], top, atol=1e-4)
    named = np.asarray(found.top_tokens[row, places])
    assert all(len(set(one)) == num_top for one in named.tolist())
    there = np.take_along_axis(expected, named, axis=1)
    np.testing.assert_allclose(there, top, atol=1e-4)


def toy_requests(rows: int, rule: str, new_tokens: int = 20) -> Requests:
    temperature = [0.0] * rows if rule == "greedy" else [1.0, 0.0, 0.6, 1.0][:rows]
    return make_requests(
        PROMPTS[:rows],
        max_new_tokens=[new_tokens, 1, new_tokens + 9, 17][:rows],
        temperature=temperature,
        top_k=[0, 0, 5, 0][:rows],
        top_p=[1.0, 1.0, 0.9, 0.8][:rows],
        min_p=[0.02, 0.0, 0.0, 0.0][:rows],
        seeds=range(rows),
    )


@pytest.mark.parametrize(
    ("name", "rule", "rows", "config"),
    [
        ("tree", "coupled", 1, CONFIG),
        ("tree", "rejection", 4, CONFIG),
        ("switch", "greedy", 4, LogprobsConfig()),
    ],
)
def test_rounds_and_plain_steps_record_what_a_judge_computes(
    name: str, rule: Any, rows: int, config: LogprobsConfig
) -> None:
    requests, decoder = toy_requests(rows, rule), toy_decoder(name, rule, config)
    state = speculative.generate(decoder, PARAMS, requests)
    check(decoder, PARAMS, state)
    plain = autoregressive.generate(decoder, PARAMS, requests)
    check(decoder, PARAMS, plain)
    without = dataclasses.replace(decoder, logprobs=None)
    asked_nothing = speculative.generate(without, PARAMS, requests)
    assert asked_nothing.logprobs is None
    np.testing.assert_array_equal(state.tokens, asked_nothing.tokens)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_constraints_and_processors_change_none_of_them(rule: Any) -> None:
    target = ToyTarget(vocab_size=LETTERS, sharpness=1.0)
    model = ToyModel(vocab_size=LETTERS, sharpness=1.0, seed=7)
    decoder = Decoder(
        target=target,
        drafter=TreeDrafter(model=model, tree=TREE),
        acceptance=rule,
        constraint=AUTOMATON,
        logprobs=CONFIG,
    )
    params = Params(target=(), constraint=TABLES)
    requests = make_requests(
        [[1, 2], [3]],
        max_new_tokens=20,
        temperature=[1.0, 0.0],
        seeds=[0, 1],
        processors=ProcessorConfig(presence_penalty=0.5, logit_bias={2: 1.0}),
    )
    state = speculative.generate(decoder, params, requests)
    check(decoder, params, state)
    check(decoder, params, autoregressive.generate(decoder, params, requests))


def test_texts_that_enter_rows_get_those_that_each_has_alone() -> None:
    """By `Result` call for call, and in the state of the rows."""
    decoder = toy_decoder("tree", "coupled")
    asked = [
        make_requests([prompt], max_new_tokens=15, temperature=1.0, seeds=row)
        for row, prompt in enumerate(PROMPTS[:2])
    ]
    state = slots.init_decode_state(decoder, PARAMS, batch=3, num_slots=64)
    parts: list[list[Any]] = []
    for row, request in zip((2, 0), asked, strict=True):
        prefix, first = slots.prefill(decoder, PARAMS, request, num_slots=64)
        state = slots.insert(prefix, state, row)
        parts.append([leaf[0] for leaf in jax.tree.leaves(first.logprobs)])
    while bool(state.is_running.any()):
        state, result = slots.generate(decoder, PARAMS, state, rounds=2)
        for row, found in zip((2, 0), parts, strict=True):
            new = [
                leaf[row, : result.counts[row]]
                for leaf in jax.tree.leaves(result.logprobs)
            ]
            found[:] = map(np.concatenate, zip(found, new, strict=True))
    for row, request, found in zip((2, 0), asked, parts, strict=True):
        alone = autoregressive.generate(decoder, PARAMS, request, num_slots=64)
        begin, end = int(request.prompt_lengths[0]), int(alone.lengths[0])
        leaves = map(jax.tree.leaves, (alone.logprobs, found, state.logprobs))
        for wanted, added, there in zip(*leaves, strict=True):
            np.testing.assert_allclose(added, wanted[0, begin:end], atol=1e-4)
            # With the prompt's, which no result holds.
            np.testing.assert_allclose(there[row, 1:end], wanted[0, 1:end], atol=1e-4)


def test_a_cache_that_grows_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "FIRST_LENGTH", 48)
    decoder, requests = toy_decoder("tree", "coupled"), toy_requests(4, "coupled", 130)
    for library in (speculative, autoregressive):
        state = library.generate(decoder, PARAMS, requests)
        assert state.tokens.shape[1] > 64
        check(decoder, PARAMS, state)


def test_a_prompts_are_right_across_the_borders_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "PREFILL_CHUNK", 8)
    # A target of its own: programs are kept by decoder, and have the usual chunks.
    target = ToyTarget(vocab_size=11, seed=5)
    decoder = Decoder(target=target, logprobs=CONFIG)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(11, size=n).tolist() for n in (1, 7, 8, 9, 16, 17, 24)]
    requests = make_requests(prompts, max_new_tokens=1, prompt_bucket=24)
    state = speculative.prefill(decoder, Params(target=()), requests, num_slots=64)
    check(decoder, Params(target=()), state)


def test_a_trained_pairs_are_the_same_with_and_without_drafts(
    stories: Stories,
) -> None:
    requests, *_ = batches(stories, 4, temperature=[0.0, 1.0] * 2, top_p=0.9)
    drafter = stories.drafter(num_nodes=16, depth=3)
    decoder = Decoder(target=stories.target, drafter=drafter, logprobs=CONFIG)
    params = stories.params(stories.trained)
    state = speculative.generate(decoder, params, requests, num_slots=128)
    assert int(state.accept_lengths.sum()) > 0
    check(decoder, params, state)
    check(decoder, params, autoregressive.generate(decoder, params, requests))


@pytest.mark.torch
def test_those_of_the_stories_model_are_those_of_transformers(
    stories: Stories, shared: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        shared / "models" / "stories260K", dtype=torch.float32
    )
    requests, *_ = batches(stories, 4, temperature=[0.0, 0.0, 1.0, 1.0])
    decoder = Decoder(
        target=stories.target, drafter=stories.drafter(num_nodes=16), logprobs=CONFIG
    )
    params = stories.params(stories.trained)
    state = speculative.generate(decoder, params, requests, num_slots=128)
    assert state.logprobs is not None
    for row, length in enumerate(state.lengths.tolist()):
        tokens = state.tokens[row, :length]
        with torch.no_grad():
            logits = model(torch.tensor([tokens.tolist()])).logits[0]
        expected = torch.log_softmax(logits, dim=-1).numpy()
        check_places(state.logprobs, row, 0, expected[:-1], tokens)


def lowered(config: LogprobsConfig | None) -> tuple[str, DecodeState]:
    decoder, requests = toy_decoder("tree", "greedy", config), toy_requests(4, "greedy")
    state: Any = jax.eval_shape(
        lambda: speculative.prefill(decoder, PARAMS, requests, num_slots=64)
    )
    return speculative.decode_round.lower(decoder, PARAMS, state).as_text(), state


def shapes(nodes: int, text: str) -> Sequence[str]:
    """The operations on logits of so many nodes that a softmax has."""
    kind = f"tensor<4x{nodes}x11xf32>"
    return [line for line in text.split("\n") if "exponential" in line and kind in line]


def test_nothing_is_compiled_when_nobody_asks_and_a_path_when_somebody_does() -> None:
    without, state = lowered(None)
    with_them, larger = lowered(CONFIG)
    path, nodes = TREE.depth + 1, TREE.num_nodes
    assert shapes(path, with_them) and not shapes(nodes, with_them)
    assert not shapes(path, without) and f"tensor<4x{path}x11xf32>" not in without
    more = len(jax.tree.leaves(larger)) - len(jax.tree.leaves(state))
    assert more == 3 and state.logprobs is None


def test_what_nobody_can_answer_is_refused() -> None:
    requests = toy_requests(1, "greedy")
    for library in (speculative, autoregressive):
        decoder = toy_decoder("tree", "greedy", LogprobsConfig(num_top=12))
        refused(
            lambda library=library, decoder=decoder: library.generate(
                decoder, PARAMS, requests
            ),
            "num_top = 12 log-probabilities were asked for",
            "the target knows 11 tokens",
        )
    refused(lambda: LogprobsConfig(num_top=-1), "num_top = -1 must be 0 or more")
