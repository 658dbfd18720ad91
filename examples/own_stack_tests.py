"""Property tests of a stack of your own, with hypothesis, chex and eagle_jax.testing.

The stack is the model of `own_target.py` and the drafter of `own_drafter.py`; put yours
in their place. Each test is a claim about every text, tree and batch that hypothesis
can think of, within shapes that stay the same, so that each program compiles once.

Run it with `python -m pytest examples/own_stack_tests.py`; docs/test-your-stack.md
explains it.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_jax
from eagle_jax import autoregressive, speculative
from eagle_jax.testing import assert_same_tokens, assert_valid_tree
from eagle_jax.tree import NO_PARENT, ancestor_mask
from examples.own_drafter import FollowerDrafter
from examples.own_target import WORDS, OwnTarget, init_params

TARGET, WEIGHTS, VOCABULARY = OwnTarget(), init_params(seed=0), len(WORDS)
DRAFTER = FollowerDrafter(vocab_size=VOCABULARY)
DECODER = eagle_jax.Decoder(target=TARGET, drafter=DRAFTER)
PARAMS = eagle_jax.Params(target=WEIGHTS)

ROWS, NODES, NEW_TOKENS, SLOTS = 3, 8, 12, 64
tokens = st.integers(0, VOCABULARY - 1)
trees = st.tuples(
    st.tuples(*[tokens] * NODES),
    # Each node hangs below the root or below any node before it.
    st.tuples(*[st.integers(0, node - 1) for node in range(1, NODES)]),
)
texts = st.fixed_dictionaries(
    {
        "prompt": st.lists(tokens, min_size=1, max_size=8),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "seed": st.integers(0, 2**32 - 1),
    }
)
batches = st.lists(texts, min_size=ROWS, max_size=ROWS)
few = settings(max_examples=20, deadline=None)  # The first example compiles.


@functools.partial(jax.jit, static_argnames=("target",))
def read(target: Any, tokens: jax.Array, positions: jax.Array, mask: Any) -> jax.Array:
    """Returns the logits `[B, T, V]` of texts, or of a tree with its mask."""
    cache = target.init_cache(len(tokens), 0)
    output = target.forward(WEIGHTS, tokens, positions, mask, cache)
    return target.unembed(WEIGHTS, output.hidden)


@few
@given(tree=trees)
def test_a_node_reads_its_ancestors_and_nothing_else(tree: Any) -> None:
    """A tree's logits at every node are those after the node's path, read as a text."""
    words, parents = jnp.array(tree[0]), jnp.array([NO_PARENT, *tree[1]])
    mask = ancestor_mask(parents)
    depths = mask.sum(axis=1) - 1
    found = read(TARGET, words[None], depths[None], mask[None])[0]
    paths = np.zeros((NODES, NODES), np.int32)
    for node in range(NODES):
        path = words[mask[node]]
        paths[node, : len(path)] = path
    places = jnp.broadcast_to(jnp.arange(NODES), paths.shape)
    alone = read(TARGET, jnp.asarray(paths), places, None)
    expected = alone[jnp.arange(NODES), depths]
    chex.assert_shape(found, (NODES, VOCABULARY))
    chex.assert_trees_all_close(found, expected, atol=1e-4)


def requests_of(batch: Any) -> eagle_jax.Requests:
    """Returns the requests of a batch."""
    return eagle_jax.make_requests(
        [text["prompt"] for text in batch],
        max_new_tokens=NEW_TOKENS,
        temperature=[text["temperature"] for text in batch],
        seeds=[text["seed"] for text in batch],
    )


def written(batch: Any, state: eagle_jax.DecodeState) -> list[list[int]]:
    """Returns what was added to each prompt."""
    starts = [len(text["prompt"]) for text in batch]
    rows = zip(state.tokens.tolist(), starts, state.lengths.tolist(), strict=True)
    return [row[start:end] for row, start, end in rows]


@few
@given(batch=batches)
def test_drafts_never_change_a_text(batch: Any) -> None:
    """Text is that of plain decoding, at any temperature and with any seed."""
    requests = requests_of(batch)
    drafted = speculative.generate(DECODER, PARAMS, requests, num_slots=SLOTS)
    plain = autoregressive.generate(DECODER, PARAMS, requests, num_slots=SLOTS)
    assert_same_tokens(written(batch, drafted), written(batch, plain))


@few
@given(batch=batches)
def test_a_text_depends_on_its_row_alone(batch: Any) -> None:
    """Neighbours in the batch, and the place in it, change nothing."""
    others = [batch[1], {"prompt": [1, 2], "temperature": 1.0, "seed": 5}, batch[0]]
    state = speculative.generate(DECODER, PARAMS, requests_of(batch), num_slots=SLOTS)
    moved = speculative.generate(DECODER, PARAMS, requests_of(others), num_slots=SLOTS)
    first, second, _ = written(batch, state)
    assert_same_tokens([first, second], [written(others, moved)[row] for row in (2, 0)])


@few
@given(batch=batches)
def test_every_drafted_tree_is_valid(batch: Any) -> None:
    """Parents come first, siblings differ, no child is worth more than its parent."""
    state = speculative.prefill(DECODER, PARAMS, requests_of(batch), num_slots=SLOTS)
    while state.is_running.any():
        state, done = speculative.decode_round(DECODER, PARAMS, state)
        for row in range(ROWS):
            assert_valid_tree(jax.tree.map(lambda leaf, row=row: leaf[row], done.tree))


def test_other_texts_compile_nothing() -> None:
    """One trace serves every batch of these shapes."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def decode_once(params: Any, state: Any) -> Any:
        return speculative.decode_round(DECODER, params, state)[0]

    for seed in range(3):
        text = {"prompt": [seed] * (seed + 1), "temperature": seed / 2, "seed": seed}
        requests = requests_of([text] * ROWS)
        state = speculative.prefill(DECODER, PARAMS, requests, num_slots=SLOTS)
        decode_once(PARAMS, state)
