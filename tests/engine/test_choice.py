"""The choice among trees, by tables of costs and of what drafts bring."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.engine.choice import STRETCH, TRIAL, Figures, Ladder, Stretch, choose

NODES, DEPTHS = (1, 4, 7, 26, 60), (0, 3, 6, 6, 6)
LADDER = Ladder(nodes=NODES, depths=DEPTHS, start=2)
PLAIN_LADDER = Ladder(nodes=NODES, depths=DEPTHS, start=0)

Cost = Callable[[int, int], float]
"""Seconds of a round of so many nodes with so many rows."""


def on_cpu(nodes: int, rows: int) -> float:
    """Products cost what they multiply, see reference figures of two cores."""
    return 0.02 * (0.9 + 0.14 * nodes * rows)


def on_h100(nodes: int, rows: int) -> float:
    """Weights are read once for all, and a round drafts besides."""
    drafting = 0.0 if nodes == 1 else 0.002 + 0.0005 * min(nodes, 6)
    return 0.006 + drafting + 1e-5 * nodes * rows


GOOD = (1.0, 2.6, 3.4, 4.3, 4.8)
BAD = (1.0, 1.02, 1.02, 1.04, 1.05)
FAIR = (1.0, 1.8, 2.0, 2.4, 2.6)


def run(
    cost: Cost,
    gains: Callable[[int], tuple[float, ...]],
    rows: int,
    *,
    rounds: int,
    ladder: Ladder = LADDER,
    compile_seconds: float = 0.0,
) -> Iterator[tuple[int, int, float]]:
    """Yields each stretch's tree, rounds and seconds, as an engine runs them."""
    figures, done, compiled = Figures(), 0, set[int]()
    while done < rounds:
        trees = range(len(NODES))
        seconds = [0.0 if tree in compiled else compile_seconds for tree in trees]
        tree, most = choose(ladder, figures, rows, left=1000, compile_seconds=seconds)
        compiled.add(tree)
        took = cost(NODES[tree], rows) * most
        yield tree, most, took
        used = round(most * rows * held(tree, rows))
        one = Stretch(
            rounds=most,
            row_rounds=used,
            tokens=round(gains(done)[tree] * used),
            seconds=took,
        )
        figures = figures.after(tree, rows, one, is_trial=most == TRIAL)
        done += most


def held(tree: int, rows: int) -> float:
    """The share of several rows that hold a text: under deeper trees more wait."""
    return 1 / (1 + 0.025 * DEPTHS[tree]) if rows > 1 else 1.0


def share_of_best(
    cost: Cost, gains: tuple[float, ...], rows: int, stretches: list
) -> float:
    """The tokens per second over those of the best tree alone."""
    brings = [gain * held(tree, rows) for tree, gain in enumerate(gains)]
    best = max(x / cost(nodes, rows) for x, nodes in zip(brings, NODES, strict=True))
    tokens = sum(brings[tree] * most for tree, most, _ in stretches)
    return tokens / sum(x[2] for x in stretches) / best


@pytest.mark.parametrize("cost", [on_cpu, on_h100])
@pytest.mark.parametrize("gains", [GOOD, FAIR, BAD])
@pytest.mark.parametrize("rows", [1, 4, 32, 256])
@pytest.mark.parametrize("ladder", [LADDER, PLAIN_LADDER])
def test_the_best_tree_is_found_within_200_rounds_and_kept(
    cost: Cost, gains: tuple[float, ...], rows: int, ladder: Ladder
) -> None:
    stretches = [*run(cost, lambda _: gains, rows, rounds=3000, ladder=ladder)]
    done = itertools.accumulate(most for _, most, _ in stretches)
    later = [one for one, end in zip(stretches, done, strict=True) if end > 200]
    assert share_of_best(cost, gains, rows, later) >= 0.96


@pytest.mark.parametrize("cost", [on_cpu, on_h100])
@pytest.mark.parametrize(("before", "after"), [(GOOD, BAD), (BAD, GOOD)])
def test_a_text_that_changes_its_kind_is_followed_within_2000_rounds(
    cost: Cost, before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    stretches = [
        *run(cost, lambda done: before if done < 1500 else after, 1, rounds=5000)
    ]
    done = itertools.accumulate(most for _, most, _ in stretches)
    later = [one for one, end in zip(stretches, done, strict=True) if end > 3500]
    assert share_of_best(cost, after, 1, later) >= 0.93


def test_nothing_is_compiled_that_gains_less_than_compiling_costs() -> None:
    trees = {
        tree
        for tree, *_ in run(
            on_cpu, lambda _: GOOD, 1, rounds=300, compile_seconds=1000.0
        )
    }
    assert trees == {LADDER.start}


@pytest.mark.parametrize(("rows", "first"), [(1, 2), (8, 2), (16, 1), (128, 1)])
def test_many_rows_begin_with_a_smaller_tree(rows: int, first: int) -> None:
    """Where rounds begin without drafts they do so with any rows."""
    for ladder, tree in ((LADDER, first), (PLAIN_LADDER, 0)):
        assert next(run(on_cpu, lambda _: GOOD, rows, rounds=1, ladder=ladder))[0] == (
            tree
        )


def test_for_more_rows_a_smaller_tree_that_promises_more_is_compiled() -> None:
    """Not for fewer rows, nor where the best of before is there already."""
    figures = Figures().after(2, 8, Stretch(64, 512, 1700, 5.0), is_trial=False)
    costs = [1000.0] * len(NODES)
    assert choose(LADDER, figures, 16, left=99, compile_seconds=costs)[0] == 1
    assert choose(LADDER, figures, 4, left=99, compile_seconds=costs)[0] == 2
    costs[2] = 0.0
    assert choose(LADDER, figures, 16, left=99, compile_seconds=costs)[0] == 2


@pytest.mark.parametrize(("rows", "tree"), [(1, 2), (16, 1)])
def test_of_several_texts_few_wait_for_others_where_trees_are_as_quick(
    rows: int, tree: int
) -> None:
    """A deeper tree that is quicker by a twentieth is taken for one text alone."""
    figures = Figures()
    for place, tokens, seconds in ((1, 3.0, 0.1), (2, 6.3, 0.2)):
        one = Stretch(100, 100, round(100 * tokens), 100 * seconds)
        figures = figures.after(place, rows, one, is_trial=True)
    costs = [1e6, 0.0, 0.0, 1e6, 1e6]
    assert choose(LADDER, figures, rows, left=99, compile_seconds=costs)[0] == tree


@pytest.mark.parametrize(("cost", "tree"), [(0.22, 1), (0.21, 2)])
def test_no_trial_of_a_tree_that_loses_though_every_draft_were_accepted(
    cost: float, tree: int
) -> None:
    """Waiting reckoned with, it could bring 7 tokens where the other brings 3."""
    figures = Figures().after(2, 16, Stretch(8, 8, 8, 8 * cost), is_trial=True)
    figures = figures.after(1, 16, Stretch(9000, 9000, 27000, 900.0), is_trial=False)
    costs = [1e6, 0.0, 0.0, 1e6, 1e6]
    assert choose(LADDER, figures, 16, left=99, compile_seconds=costs)[0] == tree


@pytest.mark.parametrize(("compiling", "tree"), [(4.0, 0), (6.0, 1)])
def test_within_one_text_plain_decoding_is_compiled_where_it_surely_pays(
    compiling: float, tree: int
) -> None:
    """What the root alone brings is known; of 100 tokens it may save 6.4 seconds."""
    figures = Figures().after(1, 1, Stretch(8, 8, 8, 0.8), is_trial=False)
    costs = [compiling, 0.0, compiling, compiling, compiling]
    assert choose(LADDER, figures, 1, left=92, compile_seconds=costs)[0] == tree


def test_of_many_rows_plain_decoding_is_not_believed_to_be_nearly_free() -> None:
    """A node costs little where there are many: measured, it takes half of a tree."""
    figures = Figures().after(1, 32, Stretch(64, 1800, 4140, 10.0), is_trial=False)
    costs = [7.0, 0.0, 1e6, 1e6, 1e6]
    assert choose(LADDER, figures, 32, left=3840, compile_seconds=costs)[0] == 1


def test_drafts_that_are_never_accepted_end_in_plain_decoding() -> None:
    stretches = [*run(on_cpu, lambda _: BAD, 1, rounds=2000, compile_seconds=3.0)]
    assert stretches[-1][0] == 0
    # What it took until then is a small part of all.
    assert share_of_best(on_cpu, BAD, 1, stretches) >= 0.9


@given(
    slope=st.floats(0.0, 0.3),
    fixed=st.floats(0.0, 1.0),
    chance=st.floats(0.0, 0.95),
    width=st.floats(1.0, 1.3),
    rows=st.sampled_from([1, 2, 8, 64]),
)
def test_whatever_rounds_cost_and_bring_it_is_near_the_best(
    slope: float, fixed: float, chance: float, width: float, rows: int
) -> None:
    """Costs grow with nodes from a fixed share on; a level is accepted by chance."""

    def cost(nodes: int, rows: int) -> float:
        return 0.01 * (1 + (fixed + slope * (nodes - 1) if nodes > 1 else 0.0))

    def gain(nodes: int, depth: int) -> float:
        one = min(chance * width ** (nodes > 7) * width ** (nodes > 26), 0.98)
        return sum(one**level for level in range(depth + 1))

    gains = tuple(gain(*sizes) for sizes in zip(NODES, DEPTHS, strict=True))
    stretches = [*run(cost, lambda _: gains, rows, rounds=6000)]
    assert share_of_best(cost, gains, rows, stretches[len(stretches) // 3 :]) >= 0.9


def test_a_stretch_ends_after_a_bounded_number_of_rounds() -> None:
    stretches = [*run(on_h100, lambda _: GOOD, 8, rounds=2000)]
    assert {most for _, most, _ in stretches} == {TRIAL, STRETCH}


def test_a_tree_that_brought_nothing_is_no_reason_to_fail() -> None:
    """A constraint may leave no token after a trial's first round."""
    figures = Figures().after(1, 1, Stretch(8, 8, 16, 0.1), is_trial=True)
    figures = figures.after(2, 1, Stretch(1, 1, 0, 0.1), is_trial=True)
    costs = [0.0] * len(NODES)
    assert choose(LADDER, figures, 1, left=9, compile_seconds=costs)[0] != 2
