"""Drafts that are drawn: the tokens are others, their distribution is the target's."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.testing import ToyModel, assert_valid_tree
from eagle_jax.tree import EAGLE1_TREE, Topology, chain, from_paths
from tests.drafting.toy_model import BlindToyModel, NarrowToyModel
from tests.helpers import make_draws, refused, texts
from tests.joint_distribution import DRAWN_TARGET as TARGET
from tests.joint_distribution import check_drawn_texts

OTHER = ToyModel(vocab_size=4, sharpness=1.0, seed=7)
NARROW = NarrowToyModel(vocab_size=4, sharpness=1.0, seed=7, known=(0, 2, 3))
BLIND = BlindToyModel(vocab_size=4, sharpness=1.0, seed=7)
TWIN = ToyModel(vocab_size=4, sharpness=1.0, seed=TARGET.seed)
# A childless node stands between the inner ones.
BUSH = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
PARAMS = Params(target=())
NUM_DRAWS = 10_000


def sampled(model: ToyModel, tree: Topology) -> TreeDrafter:
    return TreeDrafter(model=model, tree=tree, sampled=True)


@pytest.mark.parametrize(
    "temperature, top_k, tree, model",
    [
        (1.0, 0, BUSH, OTHER),
        (1.0, 0, chain(2), OTHER),
        (0.6, 3, BUSH, OTHER),
        (0.6, 3, chain(2), OTHER),
        (1.0, 0, BUSH, NARROW),
        (1.0, 0, BUSH, BLIND),
        (0.6, 3, BUSH, BLIND),
    ],
    ids=[
        "bush",
        "chain",
        "colder bush",
        "colder chain",
        "bush of fewer tokens",
        "bush of one output per level",
        "colder bush of one output per level",
    ],
)
def test_three_tokens_have_the_targets_joint_distribution(
    temperature: float, top_k: int, tree: Topology, model: ToyModel
) -> None:
    accepted = check_drawn_texts(
        sampled(model, tree),
        PARAMS,
        rule="rejection",
        temperature=temperature,
        top_k=top_k,
        num_draws=NUM_DRAWS,
    )
    assert accepted > 1 / 4  # Drafts did take part.


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_targets_own_distribution_is_always_accepted(
    top_k: int, batch: int
) -> None:
    requests = make_requests(
        [[1, 2]] * batch,
        max_new_tokens=26,
        temperature=0.8,
        top_k=top_k,
        seeds=range(batch),
    )
    state = speculative.generate(
        Decoder(target=TARGET, drafter=sampled(TWIN, chain(4)), acceptance="rejection"),
        PARAMS,
        requests,
    )
    # The first token is the prefill's, each round adds five.
    np.testing.assert_array_equal(state.num_rounds, [5] * batch)


def test_a_cold_row_beside_sampled_ones_takes_the_most_likely_tokens() -> None:
    requests = make_requests(
        [[1, 2]] * 4, max_new_tokens=20, temperature=[0.0, 1.0, 0.0, 2.0], seeds=0
    )
    state = speculative.generate(
        Decoder(target=TARGET, drafter=sampled(OTHER, BUSH), acceptance="rejection"),
        PARAMS,
        requests,
    )
    cold = make_requests([[1, 2]] * 4, max_new_tokens=20)
    plain = autoregressive.generate(
        Decoder(target=TARGET, acceptance="greedy"), Params(target=()), cold
    )
    found, expected = texts(requests, state), texts(cold, plain)
    assert found[0] == found[2] == expected[0]
    assert found[1] != expected[1]


def proposed(
    tree: Topology, rows: int, model: ToyModel = OTHER, **sampling: Any
) -> Any:
    """Trees after one text, each row with a key of its own."""
    drafter = sampled(model, tree)
    draws = make_draws(rows, **sampling)
    state = drafter.init_state(rows, 64)
    trees, _ = jax.jit(drafter.propose)((), state, jnp.zeros(rows, jnp.int32), draws)
    return jax.device_get(trees)


def test_siblings_are_drawn_without_replacement_from_the_stated_distribution() -> None:
    rows = 20_000
    trees = proposed(from_paths([(0,), (1,)]), rows)
    logits = trees.draft_logits[0, 0]
    probs = np.exp(logits) / np.exp(logits).sum()
    pairs = collections.Counter(map(tuple, trees.tokens[:, 1:].tolist()))
    for first in range(4):
        assert pairs[first, first] == 0
        for second in set(range(4)) - {first}:
            chance = probs[first] * probs[second] / (1 - probs[first])
            spread = np.sqrt(chance * (1 - chance) / rows)
            assert abs(pairs[first, second] / rows - chance) < 4.5 * spread


def test_a_distribution_with_fewer_tokens_than_ranks_has_fewer_children() -> None:
    trees = proposed(EAGLE1_TREE, 8, top_k=2)
    for row in range(8):
        tree = jax.tree.map(lambda x, row=row: np.asarray(x)[row], trees)
        assert_valid_tree(tree)
        expected = [max(path, default=0) < 2 for path in ((), *EAGLE1_TREE.paths)]
        assert tree.is_node.tolist() == expected


def test_nodes_draw_apart() -> None:
    # One distribution everywhere: with one noise, every node would have the same child.
    flat = ToyModel(vocab_size=4, sharpness=0.0, seed=0)
    trees = proposed(from_paths([(0,), (1,), (0, 0), (1, 0)]), 400, flat)
    for node, other in [(3, 4), (1, 3)]:
        differ = (trees.tokens[:, node] != trees.tokens[:, other]).mean()
        assert abs(differ - 0.75) < 0.1


@pytest.mark.parametrize("sampled", [False, True])
def test_nodes_of_one_output_have_children_of_one_distribution(sampled: bool) -> None:
    tree = from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
    drafter = TreeDrafter(model=BLIND, tree=tree, sampled=sampled)
    draws = make_draws(2, temperature=0.0)
    state, root = drafter.init_state(2, 64), jnp.zeros(2, jnp.int32)
    found, _ = drafter.propose((), state, root, draws)
    # Without noise they are the same, and differ from the level's above.
    assert found.tokens[:, 3:5].tolist() == found.tokens[:, 5:7].tolist()
    steps = np.diff(found.log_values[0, jnp.array([[1, 3], [2, 5]])], axis=1)
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)


@pytest.mark.parametrize("tree", [BUSH, chain(3)])
def test_at_temperature_0_the_most_likely_are_drafted(tree: Topology) -> None:
    drawn = proposed(tree, 2, temperature=0.0)
    drafter = TreeDrafter(model=OTHER, tree=tree)
    state, root = drafter.init_state(2, 64), jnp.zeros(2, jnp.int32)
    chosen, _ = drafter.propose((), state, root, make_draws(2))
    np.testing.assert_array_equal(drawn.tokens, chosen.tokens)
    np.testing.assert_allclose(drawn.log_values, chosen.log_values, atol=1e-5)


def test_a_dynamic_tree_of_draws_is_refused() -> None:
    refused(
        lambda: TreeDrafter(model=OTHER, tree=TreeConfig(), sampled=True),
        "dynamic tree",
    )


def test_settings_of_a_tree_that_no_drafter_reads_are_refused() -> None:
    settings: list[dict[str, Any]] = [
        {"calibration": "file.json"},
        {"shared_noise": False},
    ]
    for given in settings:
        tree = TreeConfig(**given)
        refused(
            lambda tree=tree: TreeDrafter(model=OTHER, tree=tree), "its shape alone"
        )
        assert TreeDrafter(model=OTHER, tree=tree.shape).tree == TreeConfig()
