"""Draft models that choose among some of the target's tokens alone (FR-Spec)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.interface import Params
from eagle_jax.testing import assert_valid_tree
from eagle_jax.tree import Topology, chain
from tests import tiny
from tests.helpers import make_draws, whole_prompts

VOCABULARY = 24
CONFIG = tiny.target_config(vocab_size=VOCABULARY)
HEAD = EagleHead(config=tiny.head_config(vocab_size=VOCABULARY))
TREE = TreeConfig(num_nodes=10, depth=3, width=4)
TOKENS = [0, 3, 4, 9, 10, 11, 17, 18, 22, 23]


def make(
    tokens: list[int], tree: TreeConfig | Topology = TREE, *, is_tied: bool = False
) -> tuple[TreeDrafter, Params, Any]:
    """A drafter, its narrowed weights, and those of all tokens."""
    target = tiny.target_params(dataclasses.replace(CONFIG, tie_embeddings=is_tied))
    whole = tiny.head_params(HEAD.config, target)
    params = Params(target=target, drafter=HEAD.narrow(whole, jnp.array(tokens)))
    return TreeDrafter(model=HEAD, tree=tree), params, whole


def read(drafter: TreeDrafter, params: Any) -> tuple[Any, Any, jax.Array]:
    """A state after random prompts, its roots, and their output."""
    shape = (4, 8, CONFIG.feature_size)
    chunk = whole_prompts(
        jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (4, 8)),
        jnp.arange(4, dtype=jnp.int32) + 1,
        jax.random.normal(jax.random.key(5), shape),
    )
    state = jax.jit(drafter.prefill_chunk)(params, drafter.init_state(4, 64), chunk)
    root = jnp.arange(4, dtype=jnp.int32)
    return state, root, jax.jit(drafter.model.read)(params, state, root)[0]


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_child_is_the_best_known_token_under_the_targets_noise(
    is_tied: bool,
) -> None:
    drafter, params, whole = make(TOKENS, chain(1), is_tied=is_tied)
    state, root, output = read(drafter, params.drafter)
    noise = jax.random.gumbel(jax.random.key(3), (4, 2, VOCABULARY))
    propose = jax.jit(drafter.propose)
    tree, _ = propose(params.drafter, state, root, make_draws(4, noise))
    scores = drafter.model.logits(whole, output, level=1) + noise[:, 0]
    best = jnp.argmax(scores[:, jnp.array(TOKENS)], axis=-1)
    assert tree.tokens[:, 1].tolist() == np.array(TOKENS)[best].tolist()


@pytest.mark.parametrize(
    "tokens", [[VOCABULARY - 1], TOKENS[:2], list(range(1, VOCABULARY))], ids=len
)
def test_only_known_tokens_are_drafted(tokens: list[int]) -> None:
    drafter, params, _ = make(tokens)
    state, root, _ = read(drafter, params.drafter)
    propose = jax.jit(drafter.propose)
    trees, _ = propose(params.drafter, state, root, make_draws(4))
    for row in range(4):
        tree = jax.tree.map(lambda x, row=row: np.asarray(x)[row], trees)
        assert_valid_tree(tree)
        assert set(tree.tokens[1:][tree.is_node[1:]]) <= set(tokens)
        assert tree.is_node[1]
