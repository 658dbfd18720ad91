"""A trained pair: the official code's trees, and plain decoding's text by any tree."""

import json
from pathlib import Path

import pytest

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.eagle.draft import EagleHead
from eagle_jax.interface import Params
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
