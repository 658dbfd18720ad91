"""Trees cut from one recording, against trees that were really decoded with."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, cache_slots, make_requests
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.interface import Params
from eagle_jax.testing import ToyDrafter, ToyTarget
from eagle_jax.tree import DraftTree
from eagle_jax.tuning.costs import StepCosts, num_programs, time_steps
from eagle_jax.tuning.prediction import (
    WIDTHS,
    Prediction,
    finalists,
    grid,
    parse_grid,
    predict,
    show,
)
from eagle_jax.tuning.recording import (
    NEVER,
    Recording,
    all_candidates,
    read_tree,
    record,
)
from tests.helpers import refused

pytestmark = pytest.mark.usefixtures("quick_compilation")

TARGET = ToyTarget(vocab_size=8)
DEPTH, WIDEST = 3, 4
PARAMS = Params(target=(), drafter=jnp.float32(0.7))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 3, 4, 5], [2, 2]]
TREES = ["4/3/1", "9/3/2", "30/3/4"]


def drafter(tree: TreeConfig) -> ToyDrafter:
    return ToyDrafter(target=TARGET, tree=tree)


def requests(rule: AcceptanceRule) -> Requests:
    return make_requests(
        PROMPTS,
        max_new_tokens=[40, 1, 23, 39],
        temperature=0.0 if rule == "greedy" else 0.8,
        seeds=[0, 1, 2, 3],
    )


@pytest.fixture(scope="module", params=["greedy", "coupled"])
def rule(request: pytest.FixtureRequest) -> AcceptanceRule:
    return request.param


@pytest.fixture(scope="module")
def recorded(rule: AcceptanceRule) -> list[dict[int, Recording]]:
    asked = requests(rule)
    return record(
        Decoder(target=TARGET, acceptance=rule),
        {width: drafter(all_candidates(DEPTH, width)) for width in (1, WIDEST)},
        PARAMS,
        asked,
        widths=range(1, WIDEST + 1),
        num_slots=cache_slots(asked, DEPTH),
    )


def roots(lengths: list[int]) -> np.ndarray:
    """Where the rounds of a text begin."""
    return np.cumsum([0, *(length + 1 for length in lengths)])[:-1]


@pytest.mark.parametrize("settings", TREES)
def test_the_simulated_rounds_are_those_of_real_decoding(
    settings: str, rule: AcceptanceRule, recorded: list[dict[int, Recording]]
) -> None:
    (tree,) = parse_grid(settings)
    state = speculative.generate(
        Decoder(target=TARGET, drafter=drafter(tree), acceptance=rule),
        PARAMS,
        requests(rule),
    )
    compared = 0
    for row, text in enumerate(recorded):
        lengths = text[tree.width].accept_lengths(tree)
        count = int(state.num_rounds[row])
        real = np.asarray(state.accept_lengths[row, :count]).tolist()
        if not text[tree.width].is_certain(tree)[roots(lengths)].all():
            assert 1 < tree.width < WIDEST  # These were recorded.
            continue
        assert len(lengths) == count
        assert lengths[:-1] == real[:-1]
        # The recording ends with the text, a last round may see further.
        assert lengths[-1:] <= real[-1:]
        compared += len(lengths)
    assert compared >= 20


def test_the_text_is_recorded_to_its_end(
    rule: AcceptanceRule, recorded: list[dict[int, Recording]]
) -> None:
    asked = requests(rule)
    plain = autoregressive.generate(
        Decoder(target=TARGET, acceptance="greedy" if rule == "greedy" else "coupled"),
        Params(target=()),
        asked,
    )
    lengths = [len(text[1].places) for text in recorded]
    assert lengths == np.asarray(plain.num_rounds).tolist()
    for text, length in zip(recorded, lengths, strict=True):
        (tree,) = parse_grid("37/3/4")
        emitted = sum(text[4].accept_lengths(tree)) + len(text[4].accept_lengths(tree))
        assert length <= emitted <= length + 1 or length == 0


def a_tree(nodes: list[tuple[int, int, float]]) -> DraftTree:
    """A tree of (token, parent, value) after a root, on the host."""
    rows = [(9, -1, 1.0), *nodes]
    return DraftTree(
        tokens=jnp.array([row[0] for row in rows]),
        parents=jnp.array([row[1] for row in rows]),
        log_values=jnp.log(jnp.array([row[2] for row in rows])),
        is_node=jnp.ones(len(rows), bool),
    )


# Width 3, two levels drafted of three: at level 1 `a`, `b`, `c`, and so on. The node
# 30 below `b` is second among the children that width 2 sees, but fourth of all.
CROWDED = a_tree(
    [
        *((1, 0, 0.5), (2, 0, 0.3), (3, 0, 0.15)),
        *((10, 1, 0.4), (11, 1, 0.01), (12, 1, 0.005)),
        *((30, 2, 0.03), (31, 2, 0.02), (32, 2, 0.01)),
        *((20, 3, 0.075), (21, 3, 0.074), (22, 3, 1e-4)),
        *((40, 4, 0.39), (41, 4, 0.005), (42, 4, 0.004)),
        *((50, 10, 0.07), (51, 10, 0.004), (52, 10, 0.001)),
        *((60, 11, 0.07), (61, 11, 0.004), (62, 11, 0.001)),
    ]
)


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ([1, 10, 40], [NEVER] * 3),  # Better than what is unknown: it cannot matter.
        ([2, 30, 70], [NEVER, NEVER, 4]),  # Nobody knows the children of 30.
        ([2, 32, 70], [NEVER] * 3),  # Of rank 2: width 2 has no such child.
        ([1, 11, 0], [NEVER, NEVER, 4]),  # What is after 30 may come before 11.
        ([7, 0, 0], [NEVER] * 3),  # Nothing is accepted.
    ],
)
def test_what_a_narrow_tree_would_have_expanded_is_not_guessed(
    text: list[int], unknown: list[int]
) -> None:
    places, found = read_tree(CROWDED, np.array(text), depth=3, width=2)
    assert found.tolist() == unknown
    narrow = Recording(places=places[None], unknown=found[None])
    for settings, needs_children in (("5/3/2", False), ("6/3/2", True)):
        (tree,) = parse_grid(settings)
        guesses = needs_children and unknown[2] != NEVER
        assert narrow.is_certain(tree).tolist() == [not guesses]
    _, found = read_tree(CROWDED, np.array(text), depth=3, width=3)
    assert (found == NEVER).all()


def test_places_count_what_reranking_prefers() -> None:
    places, _ = read_tree(CROWDED, np.array([1, 10, 41]), depth=3, width=3)
    # Of values 0.5, 0.4 and 0.005; the last ties with a node that comes first.
    assert places[0].tolist() == [0, 0, 0]
    assert places[1].tolist() == [NEVER, 1, 1]
    values = np.exp(np.asarray(CROWDED.log_values))[1:]
    ahead = (values > 0.0051).sum() + 1
    assert places[2].tolist() == [NEVER, NEVER, ahead]
    places, _ = read_tree(CROWDED, np.array([2, 31, 0]), depth=3, width=1)
    assert (places == NEVER).all()


def recording(path_places: list[int]) -> Recording:
    """A text in which every root's token of level 1 has this place."""
    tables = np.full((len(path_places), 2, 2), NEVER, np.int32)
    tables[:, 0, :] = np.array(path_places)[:, None]
    return Recording(places=tables, unknown=tables[:, 1, :])


COSTS = StepCosts(
    token=1.0,
    verify={1: 0.9, 2: 1.5, 4: 2.5},
    read={1: 0.25, 2: 0.5},
    step={1: 0.125, 2: 0.25},
)


def test_a_rounds_cost_is_the_sum_of_its_parts() -> None:
    costs = dataclasses.replace(COSTS, overhead=0.0625)
    tree = TreeConfig(num_nodes=3, depth=2, width=2)
    assert costs.round_seconds(tree) == 2.0 + 0.5 + 0.25 + 0.0625
    shallow = TreeConfig(num_nodes=2, depth=9, width=1)  # One level fits.
    assert costs.round_seconds(shallow) == 1.5 + 0.25 + 0.0625


def test_a_batch_runs_as_long_as_its_longest_row() -> None:
    trees = parse_grid("2/1/1")
    # 6 tokens in 3 rounds, 4 tokens in 4 rounds.
    recorded = [{1: recording([0] * 6)}, {1: recording([5] * 4)}]
    one, two = (predict(trees, recorded, COSTS, batch_size=size)[0] for size in (1, 2))
    assert one.tokens_per_round == two.tokens_per_round == 10 / 7
    assert one.speedup == pytest.approx(10 / (7 * 1.75))
    assert two.speedup == pytest.approx(6 / (4 * 1.75))


def test_the_quickest_tree_comes_first() -> None:
    trees = parse_grid("3/2/1 2/1/1 4/1/2")
    found = predict(
        trees,
        [{1: recording([0] * 9), 2: recording([1] * 9)}],
        COSTS,
        batch_size=1,
    )
    speedups = [prediction.speedup for prediction in found]
    assert speedups == sorted(speedups, reverse=True)
    assert show(found[0].tree) == "2/1/1"


def test_finalists_have_several_widths() -> None:
    settings = "3/2/1 4/3/1 5/4/1 6/5/1 8/3/2 8/4/4"
    predictions = [
        Prediction(tree=tree, tokens_per_round=2.0, speedup=9.0 - number)
        for number, tree in enumerate(parse_grid(settings))
    ]
    chosen = finalists(predictions, 4)
    assert [show(p.tree) for p in chosen] == ["3/2/1", "4/3/1", "8/3/2", "8/4/4"]
    # Where there are no others, the next best of a width are taken.
    chosen = finalists(predictions, 5)
    assert [show(p.tree) for p in chosen][2] == "5/4/1"
    assert finalists(predictions[:1], 5) == predictions[:1]


def test_the_grid_holds_each_tree_once_and_no_padding() -> None:
    trees = grid(max_nodes=16, max_depth=6)
    assert len(set(trees)) == len(trees)
    for tree in trees:
        assert tree.levels == tree.depth <= 6
        candidates = all_candidates(tree.depth, tree.width)
        assert tree.num_nodes <= min(16, candidates.num_nodes)
    assert {tree.width for tree in trees} == set(WIDTHS)


@pytest.mark.parametrize("text", ["", "8/7", "8-7-1", "8/7/1,9/8/1", "1/3/2", "8/0/2"])
def test_grids_that_draft_nothing_are_refused(text: str) -> None:
    refused(lambda: parse_grid(text), "num_nodes" if text else "")
    refused(lambda: parse_grid(f"60/6/{'9' * 5000}"), "must be num_nodes/depth")


def test_every_part_of_a_round_is_timed() -> None:
    nodes, widths, reports = (1, 3), (2,), []
    costs = time_steps(
        lambda tree: Decoder(target=TARGET, drafter=drafter(tree), acceptance="greedy"),
        PARAMS,
        make_requests([[1, 2, 3]] * 2, max_new_tokens=3),
        num_slots=32,
        nodes=nodes,
        widths=widths,
        depth=2,
        repeats=1,
        report=reports.append,
    )
    assert set(costs.verify) == set(nodes)
    assert set(costs.read) == set(costs.step) == set(widths)
    assert min(costs.token, *costs.verify.values(), *costs.read.values()) > 0
    assert min(costs.overhead, *costs.step.values()) >= 0
    assert reports == list(range(1, num_programs(nodes, widths, 2) + 1))
