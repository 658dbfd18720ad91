"""What a GPU at hand for ten minutes should measure, most important first.

Every case is one result, which can be written as soon as it is there.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.benchmarks.random_pairs import open_random
from eagle_jax.benchmarks.rounds import time_decoding, time_drafts
from eagle_jax.config import DraftQuantization, Dtype, TreeConfig
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests, round_up_slots
from eagle_jax.engine import Pair, PairConfig, load_embedded_pair
from eagle_jax.engine.open import with_target
from eagle_jax.models.transformer import TransformerConfig

_LARGE = TreeConfig(num_nodes=60, depth=6, width=10)
_CHAIN = TreeConfig(num_nodes=8, depth=7, width=1)
_PROMPT, _REPEATS = 512, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteCase:
    """A round that is timed beside a token of plain decoding.

    `B` rows with caches of so many slots at least, and so many tokens that are drafted;
    `None` for all.
    """

    tree: TreeConfig = _CHAIN
    rows: int = 1
    slots: int = 1070
    temperature: float = 0.0
    draft_quantization: DraftQuantization = "none"
    vocabulary: int | None = None


CASES = (
    SuiteCase(tree=_LARGE),
    SuiteCase(),
    SuiteCase(tree=TreeConfig(num_nodes=26, depth=6, width=4)),
    *(SuiteCase(tree=tree, temperature=1.0) for tree in (_LARGE, _CHAIN)),
    *(SuiteCase(tree=tree, draft_quantization="int8") for tree in (_LARGE, _CHAIN)),
    *(SuiteCase(tree=tree, vocabulary=2**14) for tree in (_LARGE, _CHAIN)),
    *(SuiteCase(rows=rows) for rows in (8, 32, 128)),
    *(SuiteCase(tree=tree, slots=2**14) for tree in (_LARGE, _CHAIN)),
)
"""All cases."""


def run_suite(
    config: TransformerConfig,
    cases: Sequence[SuiteCase],
    *,
    iterations: int,
    dtype: Dtype = "auto",
) -> Iterator[dict[str, Any]]:
    """Times rounds of a random pair, then compares texts of the embedded one.

    Args:
        config: The target's sizes.
        cases: The cases, in order.
        iterations: The rounds per measurement.
        dtype: The type of weights and caches, as `PairConfig` has it.

    Yields:
        Each case with the medians of a token, a round and its drafts in milliseconds;
        at last how many texts are those that the CPU writes.
    """
    target = open_random(config, PairConfig(dtype=dtype)).load().params.target
    for case in cases:
        begun = time.perf_counter()
        settings = PairConfig(
            tree=case.tree, draft_quantization=case.draft_quantization, dtype=dtype
        )
        pair = with_target(open_random(config, settings), target)
        if case.vocabulary is not None and pair.draft is not None:
            tokens = tuple(range(min(case.vocabulary, config.vocab_size)))
            draft = dataclasses.replace(pair.draft, tokens=tokens)
            pair = dataclasses.replace(pair, draft=draft)
        times = _times(pair.load(), case, iterations)
        yield dataclasses.asdict(case) | times | {"s": time.perf_counter() - begun}
    here, there = _embedded_texts(None), _embedded_texts(jax.devices("cpu")[0])
    yield {"texts": len(here), "as the CPU's": sum(map(str.__eq__, here, there))}


def _times(pair: Pair, case: SuiteCase, iterations: int) -> dict[str, float]:
    prompt = np.random.default_rng(0).integers(pair.vocab_size, size=_PROMPT)
    requests = make_requests(
        [prompt.tolist()] * case.rows,
        max_new_tokens=iterations + 1,
        temperature=case.temperature,
        prompt_bucket=_PROMPT,
    )
    rule = "coupled" if case.temperature else "greedy"
    plain = Decoder(target=pair.target, acceptance=rule)
    decoder = dataclasses.replace(plain, drafter=pair.drafter)
    inputs = pair.params, requests
    size = {"num_slots": round_up_slots(case.slots, case.tree.levels)}
    timers = {"token": time_decoding(plain, *inputs, **size)[0]}
    timers["round"], state = time_decoding(decoder, *inputs, **size)
    timers["drafts"] = time_drafts(pair, state, iterations)
    turns = [[1e3 * timer() for timer in timers.values()] for _ in range(1 + _REPEATS)]
    token, round_, drafts = np.median(turns[1:], axis=0).tolist()  # The first compiles.
    times = {"token": token, "round": round_, "drafts": drafts}
    return times | {"round / token": round_ / token}


def _embedded_texts(device: Any) -> list[str]:
    prompts = ["Once upon a time", "The dog was sad because", "Lily found a key"]
    with jax.default_device(device):
        pair = load_embedded_pair(dtype="float32", max_new_tokens=64)
        found = [pair.generate(prompts, temperature=degree) for degree in (0.0, 1.0)]
    return [generation.text for texts in found for generation in texts]
