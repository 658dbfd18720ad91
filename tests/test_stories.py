"""A trained pair: the official code's trees, and plain decoding's text by any tree."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import (
    LookupDrafter,
    RecyclingDrafter,
    SmallModel,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.interface import Params
from eagle_jax.processors import ProcessorConfig
from eagle_jax.testing import assert_same_tokens
from eagle_jax.tree import EAGLE1_TREE
from tests.helpers import check_recorded_rounds, decoded_rounds, texts
from tests.stories import Stories, batches, plain_texts, speculate


def test_the_text_is_what_an_independent_program_prints(
    stories: Stories, shared: Path
) -> None:
    golden = (shared / "models" / "stories260K" / "golden.txt").read_text()
    requests = make_requests([stories.tokenizer("").input_ids], max_new_tokens=200)
    plain = autoregressive.generate(
        Decoder(target=stories.target, acceptance="greedy"),
        Params(target=stories.target_params),
        requests,
    )
    state = speculative.generate(
        Decoder(target=stories.target, drafter=stories.drafter(), acceptance="greedy"),
        stories.params(stories.trained),
        requests,
    )
    for decoded in (plain, state):
        (ids,) = texts(requests, decoded)
        text = stories.tokenizer.decode(ids, skip_special_tokens=True)
        assert text.startswith(golden)


@pytest.mark.parametrize(
    "trace",
    [
        "nodes6-depth6-width1",
        "nodes26-depth5-width8",
        "nodes32-depth8-width4",
        "nodes60-depth6-width10",
    ],
)
def test_every_round_drafts_and_accepts_like_the_official_code(
    stories: Stories, shared: Path, trace: str
) -> None:
    recorded = json.loads((shared / "parity" / f"{trace}.json").read_text())
    config = recorded["config"]
    drafter = stories.drafter(
        num_nodes=config["num_nodes"], depth=config["levels"], width=config["width"]
    )
    params = stories.params(stories.trained)
    check_recorded_rounds(stories.target, drafter, params, recorded)


def test_every_static_round_is_the_official_codes(
    stories: Stories, shared: Path
) -> None:
    recorded = json.loads((shared / "parity" / "eagle1-static-26.json").read_text())
    assert EAGLE1_TREE.parents.tolist() == recorded["config"]["parents"]
    assert EAGLE1_TREE.depths.tolist() == recorded["config"]["depths"]
    drafter = TreeDrafter(model=EagleHead(config=stories.head), tree=EAGLE1_TREE)
    for run in recorded["runs"]:
        trees, accepted, _ = decoded_rounds(
            stories.target,
            drafter,
            stories.params(stories.trained),
            run["prompt_ids"],
            recorded["config"]["max_new_tokens"],
        )
        official = run["tree_tokens"]
        assert [t.tokens.tolist() for t in trees] == official[: len(trees)]
        assert accepted == run["accept_lengths"][: len(accepted)]


def test_sampled_text_is_plain_samplings_with_the_same_seeds(stories: Stories) -> None:
    """At every temperature with every filter, rows beside each other."""
    requests, *_ = batches(
        stories,
        20,
        temperature=[0.3, 0.7, 1.0, 1.5] * 5,
        top_p=[1.0, 0.9, 1.0, 0.8, 1.0] * 4,
        top_k=([0] * 8 + [20, 50]) * 2,
        min_p=([0.0] * 4 + [0.05]) * 4,
    )
    expected = plain_texts(stories, [requests], greedy=False)
    tree = {"num_nodes": 24, "width": 6}
    found = speculate(stories, requests, stories.trained, "coupled", **tree)
    assert_same_tokens(texts(requests, found), expected)


# Of words and tokens in the text that there is without: all make a difference.
PROCESSED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "ngrams": {"no_repeat_ngram_size": 3},
    "bad words": {"bad_words": [[399], [267, 337], [268, 412, 430]]},
    "min_new_tokens": {"min_new_tokens": 30, "logit_bias": {2: 20.0}},
}
PROCESSED["all"] = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "bad_words": [[346], [399, 393]],
    "min_new_tokens": 40,
    "logit_bias": {2: 9.0, 411: -2.5, 13: 1.5},
}


@pytest.mark.torch
def test_processed_texts_are_those_of_transformers(
    stories: Stories, shared: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = str(shared / "models" / "stories260K")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def their_text(prompt: list[int], asked: dict[str, Any]) -> list[int]:
        biases = {(token,): x for token, x in asked.get("logit_bias", {}).items()}
        named = {"bad_words": "bad_words_ids", "logit_bias": "sequence_bias"}
        settings = {named.get(name, name): value for name, value in asked.items()}
        settings |= {"sequence_bias": biases or None, "max_new_tokens": 60}
        ids = torch.tensor([prompt])
        return model.generate(ids, do_sample=False, **settings)[
            0, ids.numel() :
        ].tolist()

    asked = [*PROCESSED.values()] * 2
    prompts = [
        stories.openings[number // len(PROCESSED)] for number in range(len(asked))
    ]
    requests = make_requests(
        prompts,
        max_new_tokens=60,
        stop_tokens=[2],
        processors=[ProcessorConfig(**settings) for settings in asked],
    )
    drafter = stories.drafter(num_nodes=24, width=6)
    state = speculative.generate(
        Decoder(target=stories.target, drafter=drafter, acceptance="greedy"),
        stories.params(stories.trained),
        requests,
    )
    expected = list(map(their_text, prompts, asked))
    assert_same_tokens(texts(requests, state), expected)
    assert len({*map(tuple, expected)}) == len(expected)


@pytest.mark.parametrize(
    "name", ["head", "small model", "lookup", "recycling", "switch"]
)
def test_processed_stories_are_plain_processed_ones(
    stories: Stories, name: str
) -> None:
    """Every processor at once, and others in each row, greedy and sampled."""
    vocabulary = stories.target.config.vocab_size
    small = SmallModel(target=stories.target, vocab_size=vocabulary)
    head = stories.drafter(num_nodes=16, width=4)
    drafter = {
        "head": head,
        "small model": TreeDrafter(model=small, tree=head.tree),
        "lookup": LookupDrafter(depth=4),
        "recycling": RecyclingDrafter(vocab_size=vocabulary),
        "switch": SwitchDrafter(first=LookupDrafter(depth=5), second=head, min_match=2),
    }[name]
    params = stories.params(stories.trained)
    if name == "small model":
        params = Params(target=stories.target_params, drafter=stories.target_params)
    requests = make_requests(
        stories.openings[:4],
        max_new_tokens=48,
        stop_tokens=[2],
        temperature=[0.0, 0.0, 1.0, 0.7],
        seeds=range(4),
        processors=[
            ProcessorConfig(**PROCESSED["all"], frequency_penalty=0.5),
            ProcessorConfig(**PROCESSED["ngrams"], presence_penalty=1.0),
            ProcessorConfig(**PROCESSED["repetition"]),
            ProcessorConfig(),
        ],
    )
    decoder = Decoder(target=stories.target, drafter=drafter)
    state = speculative.generate(decoder, params, requests)
    plain = autoregressive.generate(decoder, params, requests)
    assert_same_tokens(texts(requests, state), texts(requests, plain))
