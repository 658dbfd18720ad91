"""Token Recycling beside plain Python written from the published procedure."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import RecyclingDrafter
from eagle_jax.interface import Params, Verified
from eagle_jax.testing import ToyTarget, assert_valid_tree
from eagle_jax.tree import RECYCLING_TREE, DraftTree, Topology, chain, from_paths

Matrix = dict[int, list[int]]


def judge_tree(matrix: Matrix, root: int, shape: Topology) -> list[int | None]:
    """The token of every node, `None` where there is none."""
    tokens: dict[tuple[int, ...], int | None] = {(): root}
    for path in shape.paths:
        above = tokens[path[:-1]]
        likely = [] if above is None else matrix.get(above, [])
        tokens[path] = likely[path[-1]] if path[-1] < len(likely) else None
    return list(tokens.values())


def judge_update(
    matrix: Matrix, tokens: list[int | None], logits: np.ndarray, width: int
) -> None:
    for token, row in zip(tokens, logits, strict=True):
        if token is not None:
            matrix[token] = np.argsort(-row, kind="stable")[:width].tolist()


def as_dict(matrix: Any) -> Matrix:
    """The rows of a matrix `[V, W]` that were filled."""
    rows = enumerate(np.asarray(matrix).tolist())
    return {token: row for token, row in rows if row[0] >= 0}


@functools.partial(jax.jit, static_argnums=0)
def round_with_logits(
    decoder: Decoder, params: Params, state: DecodeState
) -> tuple[DecodeState, DraftTree, jax.Array]:
    """A round, and all that the target said in it."""
    draws = speculative.round_draws(decoder, params, state)
    assert decoder.drafter is not None
    proposed = decoder.drafter.propose((), state.drafter_state, state.root, draws)
    state = dataclasses.replace(state, drafter_state=proposed[1])
    output, logits = speculative.run_target(decoder, params, state, proposed[0])
    accepted = speculative.accept(decoder, state, proposed[0], logits, draws.noise)
    state, _ = speculative.commit(
        decoder, params, state, proposed[0], output, logits, accepted
    )
    return state, proposed[0], logits


def follow(decoder: Decoder, params: Params, requests: Requests, rounds: int) -> None:
    """Compares every tree and, after all rounds, every row's matrix with the judge."""
    drafter = decoder.drafter
    assert isinstance(drafter, RecyclingDrafter)
    width = 1 + max((rank for path in drafter.tree.paths for rank in path), default=0)
    state = speculative.prefill(decoder, params, requests, num_slots=512)
    batch = len(requests.prompts)
    matrices: list[Matrix] = [{} for _ in range(batch)]
    for _ in range(rounds):
        is_running, roots = state.is_running.tolist(), state.root.tolist()
        assert is_running[0]
        state, tree, logits = round_with_logits(decoder, params, state)
        for row in range(batch):
            tokens = judge_tree(matrices[row], roots[row], drafter.tree)
            found = jax.tree.map(lambda x, row=row: np.asarray(x)[row], tree)
            assert_valid_tree(found)
            assert found.is_node.tolist() == [token is not None for token in tokens]
            assert found.tokens.tolist() == [token or 0 for token in tokens]
            if is_running[row]:
                judge_update(matrices[row], tokens, np.asarray(logits[row]), width)
    for row in range(batch):
        assert as_dict(state.drafter_state.likely[row]) == matrices[row]


@pytest.mark.parametrize(
    ("vocab_size", "tree"),
    [
        (24, RECYCLING_TREE),
        (6, RECYCLING_TREE),
        (1, RECYCLING_TREE),
        (24, Topology(())),
        (24, chain(1)),
        (24, from_paths([(1,), (1, 3), (4,), (4, 1)])),
    ],
    ids=["published", "few tokens", "one token", "one node", "one draft", "gaps"],
)
def test_matrices_are_the_judges_after_a_hundred_rounds(
    vocab_size: int, tree: Topology
) -> None:
    drafter = RecyclingDrafter(vocab_size=vocab_size, tree=tree)
    target = ToyTarget(vocab_size=vocab_size)
    requests = make_requests(
        [[0], [0, 0, 0]],
        max_new_tokens=[450, 20],  # The second row ends early and stays as it is.
        temperature=[0.0, 1.0],
        seeds=[0, 1],
    )
    rounds = 100 if vocab_size > 1 else 50  # One token is always accepted.
    follow(Decoder(target=target, drafter=drafter), Params(target=()), requests, rounds)


def test_of_nodes_with_one_token_the_last_real_one_teaches() -> None:
    drafter = RecyclingDrafter(vocab_size=8, tree=from_paths([(0,), (1,), (0, 0)]))
    is_node = jnp.array([[True, True, True, False], [True] * 4])
    tree = DraftTree(
        tokens=jnp.array([[5, 5, 2, 5], [5, 5, 2, 5]], jnp.int32),
        parents=jnp.array([[-1, 0, 0, -1], [-1, 0, 0, 1]], jnp.int32),
        log_values=jnp.zeros((2, 4)),
        is_node=is_node,
    )
    # Node i holds i most likely, then i + 4.
    nodes = jnp.arange(4)[:, None]
    vocabulary = jnp.arange(8)
    logits = 2.0 * (vocabulary == nodes) + (vocabulary == nodes + 4)
    verified = Verified(
        tree=tree,
        logits=jnp.broadcast_to(logits, (2, 4, 8)),
        features=jnp.zeros((2, 4, 1)),
        path=jnp.zeros((2, 3), jnp.int32),
        count=jnp.array([1, 1], jnp.int32),
    )
    found = drafter.advance((), drafter.init_state(2, 64), verified).likely
    assert as_dict(found[0]) == {5: [1, 5], 2: [2, 6]}
    assert as_dict(found[1]) == {5: [3, 7], 2: [2, 6]}
