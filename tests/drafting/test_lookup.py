"""Prompt lookup beside a plain-Python search, and retrieval from a file."""

import functools
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from eagle_jax.drafting import LookupDrafter
from eagle_jax.drafting.rest import RestConfig, make_rest
from eagle_jax.interface import Drafter
from eagle_jax.testing import assert_valid_tree
from eagle_jax.tree import DraftTree
from tests.helpers import make_draws, refused, whole_prompts

CAPACITY = 24


def judge(text: list[int], depth: int, matches: int, ngram: int) -> list[list[int]]:
    """The continuations that prompt lookup follows, the best first."""
    found = []
    for place in range(1, len(text)):
        common = 0
        while (
            common < min(ngram, place) and text[place - 1 - common] == text[-1 - common]
        ):
            common += 1
        if common:
            found.append((-common, place))
    return [text[place : place + depth] for _, place in sorted(found)[:matches]]


@functools.partial(jax.jit, static_argnums=0)
def proposed(drafter: Drafter, text: jax.Array, length: jax.Array) -> DraftTree:
    chunk = whole_prompts(text[None], length[None] - 1)
    state = drafter.prefill_chunk((), drafter.init_state(1, CAPACITY), chunk)
    tree, _ = drafter.propose((), state, text[length - 1][None], make_draws(1))
    return jax.tree.map(lambda x: x[0], tree)


def propose(text: list[int], drafter: Drafter) -> DraftTree:
    padded = np.full(CAPACITY, 99, np.int32)
    padded[: len(text)] = text
    found = proposed(drafter, padded, np.int32(len(text)))
    return jax.tree.map(np.asarray, found)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tree.tokens)):
        if tree.is_node[node]:
            above = found[int(tree.parents[node])]
            found[node] = (*above, int(tree.tokens[node]))
    return set(found.values())


@hypothesis.given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY - 1),
    matches=st.sampled_from([1, 4]),
    depth=st.just(3),
    ngram=st.sampled_from([1, 3]),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_the_tree_holds_what_followed_the_longest_matches(
    text: list[int], matches: int, depth: int, ngram: int
) -> None:
    drafter = LookupDrafter(depth=depth, num_matches=matches, max_ngram=ngram)
    tree = propose(text, drafter)
    assert_valid_tree(tree)
    assert tree.tokens[0] == text[-1]
    wanted = {
        tuple(drafts[:count])
        for drafts in judge(text, depth, matches, ngram)
        for count in range(len(drafts) + 1)
    }
    assert paths(tree) == wanted | {()}


def test_siblings_differ() -> None:
    # "1 2" is followed by 3 4, by 3 5 and by 6.
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 1, 2]
    tree = propose(text, LookupDrafter(depth=2, num_matches=3))
    assert paths(tree) == {(), (3,), (3, 4), (3, 5), (6,), (6, 1)}
    assert int(tree.is_node.sum()) == 6


@pytest.mark.parametrize("text", [[7], [7, 8], [1, 2, 3, 4]])
def test_a_text_that_repeats_nothing_drafts_nothing(text: list[int]) -> None:
    tree = propose(text, LookupDrafter(depth=3, num_matches=2))
    assert tree.is_node.tolist() == [True] + [False] * 6


@pytest.mark.parametrize("name", ["depth", "num_matches", "max_ngram"])
def test_sizes_below_their_range_are_refused(name: str) -> None:
    refused(lambda: LookupDrafter(**{name: -1}), f"{name} = -1")


# Retrieval from a text file.


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_what_followed_in_the_file_is_drafted(tmp_path: Path) -> None:
    """The longest match, though the text itself has none."""
    file = tmp_path / "store.txt"
    file.write_text("3 8 8 8 2 3 4 5 6 7", encoding="utf-8-sig")
    settings = RestConfig(datastore=str(file), num_nodes=4, depth=3, width=1)
    tree = propose([9, 2, 3], make_rest(settings, encode))
    assert tree.tokens.tolist() == [3, 4, 5, 6]
    assert tree.is_node.all()


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file, binary = tmp_path / "missing", tmp_path / "store.bin"
    binary.write_bytes(b"\xff")
    for path, named in ((None, "a text file"), (file, "No such"), (binary, "in UTF-8")):
        settings = RestConfig(datastore=path and str(path))
        refused(lambda settings=settings: make_rest(settings, encode), named)
