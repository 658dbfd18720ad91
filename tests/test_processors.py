"""Penalties and bans: a plain Python judge says what they do."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from eagle_jax import processors
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.processors import PathState, ProcessorConfig, Text
from eagle_jax.testing import ToyModel, ToyTarget
from tests.helpers import refused, texts
from tests.joint_distribution import (
    DRAWN_TARGET,
    check_joint_distribution,
    distribution_of,
)
from tests.processed import (
    BUSH,
    EACH,
    KNOWN,
    ROOM,
    STOP,
    TARGET,
    VOCABULARY,
    configs_of,
    judge,
    requests_of,
)

tokens = some.integers(0, VOCABULARY - 1)
configs = some.builds(
    ProcessorConfig,
    logit_bias=some.dictionaries(tokens, some.floats(-5, 5, width=16), max_size=6),
    repetition_penalty=some.floats(0.25, 4, width=16),
    presence_penalty=some.floats(-2, 2, width=16),
    frequency_penalty=some.floats(-2, 2, width=16),
    no_repeat_ngram_size=some.integers(0, 4),
    bad_words=some.lists(some.lists(tokens, min_size=1, max_size=4), max_size=4),
    min_new_tokens=some.integers(0, 12),
)
APPLY = jax.jit(jax.vmap(processors.apply, in_axes=(0, 0, 0, None)))
ADVANCE = jax.jit(jax.vmap(processors.advance))


@settings(deadline=None, max_examples=150)
@given(
    config=configs,
    prompt=some.lists(tokens, min_size=1, max_size=9),
    output=some.lists(some.sampled_from([0, 1, 2, STOP]), max_size=10),
    drafts=some.lists(some.sampled_from([0, 1, 2, 3]), max_size=4),
    seed=some.integers(0, 2**16),
    is_narrow=some.booleans(),
)
def test_logits_are_what_a_judge_makes_of_prompt_output_and_drafts(
    config: ProcessorConfig,
    prompt: list[int],
    output: list[int],
    drafts: list[int],
    seed: int,
    is_narrow: bool,
) -> None:
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=VOCABULARY).astype(np.float32)
    requests = requests_of([config], ROOM, prompts=[prompt], prompt_bucket=16)
    text = Text(
        settings=requests.processors or pytest.fail(),
        # What stands after the text is not read.
        tokens=jnp.array(
            [(prompt + output + rng.integers(0, VOCABULARY, 32).tolist())[:32]]
        ),
        length=jnp.array([len(prompt + output)]),
        prompt_length=requests.prompt_lengths,
        stop_tokens=requests.stop_tokens,
    )
    path = PathState.at_roots(1, 4)
    for token in drafts:
        path = ADVANCE(path, jnp.array([token]))
    expected = judge(config, prompt, output + drafts, logits)
    places = None
    if is_narrow:
        known = np.array(KNOWN)
        logits, expected = logits[known], expected[known]
        places = np.full(VOCABULARY, len(known))
        places[known] = np.arange(len(known))
    found = APPLY(text, path, jnp.array(logits)[None], places)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def toy_logits(target: ToyTarget, text: list[int]) -> np.ndarray:
    """The target's own after a text of at most 32 tokens."""
    padded = np.array([text + [0] * (32 - len(text))])
    return np.asarray(_toy_logits(target, padded))[0, len(text) - 1]


@functools.partial(jax.jit, static_argnums=0)
def _toy_logits(target: ToyTarget, padded: jax.Array) -> jax.Array:
    cache = target.init_cache(1, 0)
    output = target.forward((), padded, jnp.arange(32)[None], None, cache)
    return target.unembed((), output.hidden)


def test_plain_text_is_the_judges() -> None:
    configs, longest = configs_of(["all", *EACH]), 24
    settings: dict[str, Any] = {"temperature": 0.0, "top_k": 0}
    settings |= {"prompts": [[1, 2]] * len(configs), "max_new_tokens": longest}
    requests = requests_of(configs, **settings)
    decoder = Decoder(target=TARGET, acceptance="greedy")
    plain = autoregressive.generate(decoder, Params(target=()), requests)
    for config, found in zip(configs, texts(requests, plain), strict=True):
        text = [1, 2]
        while len(text) < 2 + longest and text[-1] != STOP:
            scores = judge(config, [1, 2], text[2:], toy_logits(TARGET, text))
            text.append(int(scores.argmax()))
        assert found == text[2:]


@pytest.mark.parametrize("is_drawn", [False, True])
def test_rejection_keeps_the_processed_distribution(is_drawn: bool) -> None:
    prompt, num_draws = [1, 2, 3], 6000
    config = ProcessorConfig(
        repetition_penalty=1.5, frequency_penalty=0.7, bad_words=[[0, 2], [3, 3]]
    )
    probs = distribution_of(prompt, 1.0, 0)

    def next_probs(path: list[int]) -> np.ndarray:
        scores = judge(config, prompt, path, toy_logits(DRAWN_TARGET, prompt + path))
        return np.exp(scores) / np.exp(scores).sum()

    expected = np.zeros_like(probs)
    for a, b in np.ndindex(4, 4):
        first, second = next_probs([])[a], next_probs([a])[b]
        expected[a, b] = first * second * next_probs([a, b])
    assert np.abs(expected - probs).sum() > 0.2
    requests = make_requests(
        [prompt] * num_draws,
        max_new_tokens=3,
        temperature=1.0,
        seeds=range(num_draws),
        processors=config,
    )
    model = ToyModel(vocab_size=4, sharpness=1.0, seed=7)
    drafter = TreeDrafter(model=model, tree=BUSH, sampled=is_drawn)
    decoder = Decoder(target=DRAWN_TARGET, drafter=drafter, acceptance="rejection")
    state = speculative.generate(decoder, Params(target=()), requests)
    check_joint_distribution(texts(requests, state), expected)


def test_requests_that_ask_for_nothing_are_those_of_none() -> None:
    free = requests_of([ProcessorConfig()] * 2)
    assert free.processors is None
    none = dataclasses.replace(free, processors=None)
    assert jax.tree.structure(none) == jax.tree.structure(free)


def test_nearby_settings_share_their_shapes() -> None:
    few, more = (
        requests_of(
            [
                ProcessorConfig(
                    no_repeat_ngram_size=size,
                    bad_words=[[1] * size] * size,
                    logit_bias=dict.fromkeys(range(size), 1.0),
                )
            ]
        )
        for size in (1, 4)
    )
    assert jax.tree.map(jnp.shape, few) == jax.tree.map(jnp.shape, more)


def test_settings_have_a_hash_and_any_sequence_may_give_them() -> None:
    listed = ProcessorConfig(bad_words=[[1, 2]], logit_bias={3: 1})
    words: Any = (np.array([1, 2]),)
    again = ProcessorConfig(bad_words=words, logit_bias=((3, 1.0),))
    assert listed == again and hash(listed) == hash(again)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0 must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty = inf"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty = nan"),
        ({"repetition_penalty": "1"}, "repetition_penalty = '1'"),
        ({"presence_penalty": 2.5}, "presence_penalty = 2.5 must be -2 to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty = -2.5"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has the id -1"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias = inf must be finite"),
        ({"logit_bias": {1: None}}, "logit_bias = None"),
        ({"logit_bias": 3}, "must map ids to numbers"),
        ({"logit_bias": {VOCABULARY: 1}}, "logit_bias has the id 12; ids are whole"),
        ({"bad_words": [[]]}, "must be lists of one id or more"),
        ({"bad_words": [1]}, "must be lists of ids"),
        ({"bad_words": [[1.5]]}, "must be lists of ids"),
        ({"bad_words": [[1, VOCABULARY]]}, "bad_words has the id 12"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size = -1"),
        ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size = 65 must be 0 to 64"),
        ({"min_new_tokens": -1}, "min_new_tokens = -1"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(given: dict[str, Any], named: str) -> None:
    refused(lambda: requests_of([ProcessorConfig(**given)]), named)


def test_each_prompt_has_its_settings() -> None:
    two = [ProcessorConfig(min_new_tokens=3)] * 2
    refused(
        lambda: make_requests([[1]], max_new_tokens=5, processors=two),
        "processors has 2 values for 1 prompts",
    )
