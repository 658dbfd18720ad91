"""EAGLE-3 heads: the official code's trees, and plain decoding's tokens."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import load_target
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer
from eagle_jax.testing import assert_same_tokens, assert_valid_tree
from eagle_jax.tree import DraftTree, Topology, chain, from_paths
from tests import tiny
from tests.heads.samples import USUAL, load_head
from tests.helpers import check_recorded_rounds, make_draws, texts, whole_prompts

VOCABULARY, KNOWN = 24, 14
CONFIG = Eagle3Head(config=USUAL).with_features(
    tiny.target_config(num_layers=7, vocab_size=VOCABULARY)
)
TARGET = Transformer(config=CONFIG)
REDUCED = Eagle3HeadConfig(
    draft_vocab_size=KNOWN,
    feature_size=CONFIG.feature_size,
    **tiny.sizes(vocab_size=VOCABULARY, num_kv_heads=4, intermediate_size=40),
)
NARROW = dataclasses.replace(REDUCED, layer=tiny.sizes(hidden_size=24)["layer"])
SIZES = {"reduced": REDUCED, "of another width": NARROW}
BUSH = from_paths([(0,), (1,), (2,), (1, 0), (2, 0), (2, 1), (2, 1, 0)])
SHAPES: dict[str, TreeConfig | Topology] = {
    "eagle2": TreeConfig(num_nodes=10, depth=3, width=4),
    "chain": chain(4),
    "bush, drawn": BUSH,
    "more ranks than tokens": from_paths([(rank,) for rank in range(KNOWN + 3)]),
    "wider than the vocabulary": TreeConfig(num_nodes=40, depth=2, width=KNOWN + 2),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 3, 5, 6], [2, 2]]


@pytest.fixture(scope="module")
def official(shared: Path) -> tuple[Transformer, Eagle3Head, Params]:
    sizes, target = load_target(shared / "models" / "random9")
    folder = shared / "models" / "random9-eagle3"
    config, head = load_head(folder, sizes, target)
    params = Params(target=target, drafter=Eagle3Head.join(head, target))
    return (
        Transformer(config=Eagle3Head(config=config).with_features(sizes)),
        Eagle3Head(config=config),
        params,
    )


@pytest.mark.parametrize("trace", ["eagle3-nodes40-depth6-width6"])
def test_every_round_drafts_and_accepts_like_the_official_code(
    official: tuple[Transformer, Eagle3Head, Params], shared: Path, trace: str
) -> None:
    target, head, params = official
    recorded = json.loads((shared / "parity" / f"{trace}.json").read_text())
    config = recorded["config"]
    tree = TreeConfig(
        num_nodes=config["num_nodes"], depth=config["levels"], width=config["width"]
    )
    drafter = TreeDrafter(model=head, tree=tree)
    check_recorded_rounds(target, drafter, params, recorded)


@pytest.fixture(scope="module")
def target_params() -> Any:
    return tiny.target_params(CONFIG)


Make = Callable[..., tuple[TreeDrafter, Params]]


@pytest.fixture(scope="module")
def make(target_params: Any) -> Make:
    def drafter(head: str, shape: str) -> tuple[TreeDrafter, Params]:
        config = SIZES[head]
        weights = tiny.sharp(Eagle3Head(config=config).init(jax.random.key(1)))
        width = config.layer.hidden_size
        if width != CONFIG.layer.hidden_size:
            table = jax.random.normal(jax.random.key(2), (VOCABULARY, width))
            weights = dataclasses.replace(weights, embedding=table)
        drafter = TreeDrafter(
            model=Eagle3Head(config=config),
            tree=SHAPES[shape],
            sampled="drawn" in shape,
        )
        params = Eagle3Head.join(weights, target_params)
        return drafter, Params(target=target_params, drafter=params)

    return drafter


def test_the_text_is_plain_decodings(make: Make) -> None:
    drafter, params = make("of another width", "eagle2")
    requests = make_requests(
        PROMPTS,
        max_new_tokens=[30, 1, 17, 29],
        temperature=1.0,
        seeds=range(len(PROMPTS)),
        prompt_bucket=16,
    )
    decoder = Decoder(target=TARGET, drafter=drafter)
    expected = autoregressive.generate(decoder, params, requests)
    found = speculative.generate(decoder, params, requests)
    assert_same_tokens(texts(requests, found), texts(requests, expected))
    np.testing.assert_array_equal(found.stop_reason, expected.stop_reason)
    assert found.accept_lengths.sum() > 0  # Drafts did take part.


def proposed(drafter: TreeDrafter, params: Params) -> tuple[DraftTree, Any]:
    """Trees after random features, and the state that they were drafted from."""
    rows = 4
    shape = (rows, 8, CONFIG.feature_size)
    chunk = whole_prompts(
        jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (rows, 8)),
        jnp.arange(rows) % 8 + 1,
        jax.random.normal(jax.random.key(5), shape),
    )
    empty = drafter.init_state(rows, 64)
    state = drafter.prefill_chunk(params.drafter, empty, chunk)
    root = jnp.arange(rows, dtype=jnp.int32)
    tree, _ = jax.jit(drafter.propose)(params.drafter, state, root, make_draws(rows))
    return tree, state


def tokens_of_the_head(params: Params) -> np.ndarray:
    return np.arange(KNOWN) + np.asarray(params.drafter.head.offsets)


@pytest.mark.parametrize("shape", SHAPES)
def test_only_tokens_of_the_head_are_drafted(make: Make, shape: str) -> None:
    drafter, params = make("reduced", shape)
    known = tokens_of_the_head(params)
    assert not np.array_equal(known, np.arange(KNOWN))  # Places are no tokens.
    trees, _ = proposed(drafter, params)
    for row in range(4):
        tree = jax.tree.map(lambda x, row=row: np.asarray(x)[row], trees)
        assert_valid_tree(tree)
        drafted = tree.tokens[1:][tree.is_node[1:]]
        assert np.isin(drafted, known).all()
        for parent in range(len(tree.parents)):
            siblings = tree.tokens[tree.parents == parent]
            assert len(set(siblings.tolist())) == len(siblings)


def test_the_distribution_of_draws_is_over_the_targets_vocabulary(make: Make) -> None:
    drafter, params = make("reduced", "bush, drawn")
    known = tokens_of_the_head(params)
    tree, state = proposed(drafter, params)
    output, _ = drafter.model.read(params.drafter, state, jnp.arange(4))
    logits = drafter.model.logits(params.drafter, output, level=1)
    assert tree.draft_logits is not None
    probs = np.asarray(tree.draft_logits)[:, 0]
    assert probs.shape == (4, VOCABULARY)
    np.testing.assert_allclose(probs[:, known], logits, rtol=1e-4)
    others = np.setdiff1d(np.arange(VOCABULARY), known)
    assert (probs[:, others] == -np.inf).all()
