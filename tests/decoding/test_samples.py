"""Several samples of a prompt, which is read once, are those of separate calls."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.logprobs import LogprobsConfig
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.interface import Params, TargetOutput
from eagle_jax.interface import prefill as reading
from eagle_jax.testing import ToyModel, ToyTarget, assert_same_tokens
from tests import tiny
from tests.helpers import refused, texts

SAMPLES = 3
LONG, SHORT = [5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7], [2, 2]
TREE = TreeConfig(num_nodes=8, depth=2, width=3)
TOYS = TreeDrafter(model=ToyModel(), tree=TREE)
TOY_PARAMS = Params(target=(), drafter=jnp.float32(0.7))
PAIR = tiny.pair(tiny.TARGET, tiny.HEAD, TREE)


def asked(temperature: Any, prompts: list[list[int]]) -> Requests:
    """`SAMPLES` neighbours of each prompt, all with seeds of their own."""
    rows = [prompt for prompt in prompts for _ in range(SAMPLES)]
    return make_requests(
        rows,
        max_new_tokens=12,
        temperature=temperature,
        seeds=range(len(rows)),
    )


def test_samples_that_share_a_prefill_are_those_of_separate_calls() -> None:
    """Drawn ones of one prompt, greedy ones of the other."""
    decoder = Decoder(
        target=PAIR.target,
        drafter=PAIR.drafter,
        logprobs=LogprobsConfig(num_top=2, prompt=True),
    )
    params = PAIR.params
    together = asked([1.0] * SAMPLES + [0.0] * SAMPLES, [LONG, SHORT])
    each = [
        jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], together)
        for row in range(2 * SAMPLES)
    ]
    for library in (speculative, autoregressive):
        state = library.generate(decoder, params, together, num_samples=SAMPLES)
        alone = [library.generate(decoder, params, one) for one in each]
        found = texts(together, state)
        wanted = [
            text
            for one, by_itself in zip(each, alone, strict=True)
            for text in texts(one, by_itself)
        ]
        assert_same_tokens(found, wanted)
        assert len(set(map(tuple, found))) == SAMPLES + 1
        shared: Any = state.logprobs
        apart: Any = [by_itself.logprobs for by_itself in alone]
        apart = jax.tree.map(lambda *rows: jnp.concatenate(rows), *apart)
        for row, end in enumerate(state.lengths.tolist()):
            own = shared.own[row, 1:end], apart.own[row, 1:end]
            np.testing.assert_allclose(*own, atol=1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(ToyTarget):
    """Notes the shapes of the tokens that are read.

    Programs are kept by decoder, and each size of chunks needs its own.
    """

    chunk: int

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> TargetOutput:
        SEEN.append(tokens.shape)
        return super().forward(params, tokens, positions, mask, cache)


SEEN: list[tuple[int, ...]] = []


@pytest.mark.parametrize("chunk", [512, 8])
def test_a_shared_prompt_is_read_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(reading, "PREFILL_CHUNK", chunk)
    decoder = Decoder(target=Counting(chunk=chunk), drafter=TOYS)
    requests = asked(1.0, [LONG, SHORT])
    SEEN.clear()
    state = speculative.prefill(
        decoder, TOY_PARAMS, requests, num_slots=64, num_samples=SAMPLES
    )
    assert set(SEEN) == {(2, min(16, chunk))}
    assert state.tokens.shape == (2 * SAMPLES, 64)
    whole = speculative.prefill(decoder, TOY_PARAMS, requests, num_slots=64)
    assert set(SEEN) == {(2, min(16, chunk)), (2 * SAMPLES, min(16, chunk))}
    np.testing.assert_array_equal(state.tokens, whole.tokens)
    np.testing.assert_array_equal(state.target_cache.length, whole.target_cache.length)


def test_rows_that_do_not_share_their_prompts_are_refused() -> None:
    decoder = Decoder(target=ToyTarget(), drafter=TOYS)
    rows = make_requests([SHORT, SHORT, SHORT, [2, 2, 0]], max_new_tokens=2)
    for library in (speculative, autoregressive):
        for num_samples, named in (
            (2, "prompt 3 differs from prompt 2, but num_samples = 2 neighbours"),
            (3, "num_samples = 3 must divide the 4 requests"),
            (0, "num_samples = 0 must divide"),
        ):
            refused(
                lambda library=library, num_samples=num_samples: library.generate(
                    decoder, TOY_PARAMS, rows, num_samples=num_samples
                ),
                named,
            )
