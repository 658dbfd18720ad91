"""Drafting under the noise of the target's draws: its text, in fewer rounds."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import Calibration, Confidence, TreeDrafter
from eagle_jax.interface import Drafter, Params
from eagle_jax.testing import ToyModel, ToyTarget, assert_same_tokens, assert_valid_tree
from eagle_jax.testing.toys import path_code
from eagle_jax.tree import EAGLE1_TREE, DraftTree, Topology, chain, from_paths
from tests.drafting.toy_model import NarrowToyModel
from tests.helpers import make_draws, texts
from tests.joint_distribution import DRAWN_TARGET, check_drawn_texts

V = 8
TARGET = ToyTarget(vocab_size=V)
TWIN = ToyModel(vocab_size=V, sharpness=TARGET.sharpness, seed=TARGET.seed)
NEAR = dataclasses.replace(TWIN, sharpness=1.2)  # The target's own order, flatter.
OTHER = dataclasses.replace(TWIN, seed=7)
NARROW = NarrowToyModel(
    vocab_size=V, sharpness=1.2, seed=TARGET.seed, known=(0, 2, 3, 6, 7)
)
DYNAMIC = TreeConfig(num_nodes=12, depth=4, width=3)
# The order of ranks turns round, and rows at temperature 0 have a kappa of their own.
CALIBRATED = Calibration(
    greedy=Confidence(kappa=0.5, exponents=((0.5, 1.0), (2.0, 0.3))),
    sampled=Confidence(kappa=3.0, exponents=((2.0, 1.5, 0.5), (0.5, 0.25, 0.125))),
)
DRAFTERS: dict[str, Drafter] = {
    "dynamic": TreeDrafter(model=NEAR, tree=DYNAMIC),
    "static": TreeDrafter(model=NEAR, tree=EAGLE1_TREE),
    "chain": TreeDrafter(model=NEAR, tree=chain(4)),
    "twin's chain": TreeDrafter(model=TWIN, tree=chain(4)),
    "unlike the target": TreeDrafter(model=OTHER, tree=DYNAMIC),
    "fewer tokens": TreeDrafter(model=NARROW, tree=DYNAMIC),
    "calibrated": TreeDrafter(model=NEAR, tree=DYNAMIC, calibration=CALIBRATED),
    "noise not shared": TreeDrafter(model=NEAR, tree=DYNAMIC, shares_noise=False),
}
PARAMS = Params(target=())

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.2},
    {"top_p": 0.95, "top_k": 5, "min_p": 0.02},
]
# Every temperature with every filter, and rows of temperature 0 between them.
WARM = list(itertools.product([0.3, 0.7, 1.0, 1.5], FILTERS))
COLD: list[tuple[float, dict[str, Any]]] = [(0.0, {}), (0.0, {"top_k": 2})]
ROWS: list[dict[str, Any]] = [
    {"temperature": temperature} | filters
    for start in range(0, 20, 5)
    for temperature, filters in [COLD[start % 2], *WARM[start : start + 5]]
]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 3], [2, 2], [0], [7, 7], [3, 1], [6]]


def requests_of(rows: range, **settings: Any) -> Requests:
    """Requests of some of `ROWS`, each the same in any batch."""
    chosen = [ROWS[row] for row in rows]
    settings = {"max_new_tokens": 26} | settings
    return make_requests(
        [PROMPTS[row % 8] for row in rows],
        temperature=[row["temperature"] for row in chosen],
        top_p=[row.get("top_p", 1.0) for row in chosen],
        top_k=[row.get("top_k", 0) for row in chosen],
        min_p=[row.get("min_p", 0.0) for row in chosen],
        seeds=[100 + row for row in rows],
        **settings,
    )


BATCHES = [range(start, start + 8) for start in range(0, 24, 8)]


@functools.cache
def plain(rows: range) -> tuple[list[list[int]], list[int]]:
    """What plain sampling writes, and why it ends."""
    requests = requests_of(rows, stop_tokens=[5])
    state = autoregressive.generate(
        Decoder(target=TARGET, acceptance="coupled"), Params(target=()), requests
    )
    return texts(requests, state), state.stop_reason.tolist()


def decode(drafter: Drafter, requests: Requests) -> DecodeState:
    return speculative.generate(
        Decoder(target=TARGET, drafter=drafter, acceptance="coupled"), PARAMS, requests
    )


def check_text(drafter: Drafter, rows: range) -> int:
    """Returns how many drafts were accepted."""
    requests = requests_of(rows, stop_tokens=[5])
    state = decode(drafter, requests)
    expected, reasons = plain(rows)
    assert_same_tokens(texts(requests, state), expected)
    assert state.stop_reason.tolist() == reasons
    return int(state.accept_lengths.sum())


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_plain_samplings_with_the_same_seeds(name: str) -> None:
    """At every temperature with every filter, rows beside each other."""
    assert sum(check_text(DRAFTERS[name], rows) for rows in BATCHES) > 0


@pytest.mark.parametrize("name", ["calibrated", "static"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_next_to_temperature_0_every_way_writes_the_text_of_temperature_0(
    name: str, top_p: float
) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 26, "top_p": top_p}
    warm = make_requests(
        PROMPTS,
        temperature=[1e-7, 1e-9, 1e-30, 1e-37, 3e-38, 1.2e-38, 1e-45, 0.0],
        **settings,
    )
    cold = make_requests(PROMPTS, **settings)
    expected = texts(
        cold,
        autoregressive.generate(
            Decoder(target=TARGET, acceptance="greedy"), Params(target=()), cold
        ),
    )
    sampled = autoregressive.generate(
        Decoder(target=TARGET, acceptance="coupled"), Params(target=()), warm
    )
    assert_same_tokens(texts(warm, sampled), expected)
    for rule in ("coupled", "rejection"):
        state = speculative.generate(
            Decoder(target=TARGET, drafter=DRAFTERS[name], acceptance=rule),
            PARAMS,
            warm,
        )
        assert_same_tokens(texts(warm, state), expected)
        assert int(state.accept_lengths.sum()) > 0


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_a_rows_text_is_the_same_alone(name: str) -> None:
    for row in range(6):
        check_text(DRAFTERS[name], range(row, row + 1))


def rounds_of(drafter: Drafter) -> tuple[list[list[int]], list[int]]:
    """The texts of the first batch, and how many rounds each took."""
    requests = requests_of(BATCHES[0])
    state = decode(drafter, requests)
    return texts(requests, state), state.num_rounds.tolist()


def test_a_better_draft_takes_fewer_rounds_for_the_same_text() -> None:
    text, fewer = rounds_of(DRAFTERS["dynamic"])
    for name in ("unlike the target", "noise not shared"):
        same, more = rounds_of(DRAFTERS[name])
        assert_same_tokens(same, text)
        assert sum(more) > sum(fewer)


@pytest.mark.parametrize("batch", [1, 8])
def test_the_targets_own_model_is_accepted_to_the_full_depth(batch: int) -> None:
    """Under every setting: its noise is that of the drafted positions and rows."""
    for start in range(0, 24 if batch == 8 else 6, batch):
        requests = requests_of(range(start, start + batch))
        state = decode(DRAFTERS["twin's chain"], requests)
        # The first token is the prefill's, each round adds five.
        assert state.num_rounds.tolist() == [5] * batch
        assert (state.accept_lengths[:, :5] == 4).all()


@pytest.mark.parametrize("name", ["calibrated", "static", "dynamic"])
def test_rows_of_temperature_0_draft_as_a_greedy_batch_does(name: str) -> None:
    """Beside rows of other temperatures, too."""
    drafter, rows = DRAFTERS[name], BATCHES[0]
    mixed = requests_of(rows)
    cold = dataclasses.replace(mixed.sampling, temperature=jnp.zeros(8))
    batches: list[tuple[Requests, speculative.AcceptanceRule]] = [
        (mixed, "coupled"),
        (dataclasses.replace(mixed, sampling=cold), "greedy"),
    ]
    trees = [list(drafted(drafter, *batch)) for batch in batches]
    is_cold = np.array([ROWS[row]["temperature"] == 0 for row in rows])
    for found, expected in zip(*trees, strict=True):
        for field in ("tokens", "parents", "is_node"):
            np.testing.assert_array_equal(
                getattr(found, field)[is_cold], getattr(expected, field)[is_cold]
            )
        values = [tree.log_values[is_cold] for tree in (found, expected)]
        np.testing.assert_allclose(*values, atol=1e-5)
    # The other rows do not: the noise chooses other children.
    first = [tree[0].tokens[~is_cold] for tree in trees]
    assert (first[0] != first[1]).any()


def drafted(
    drafter: Drafter, requests: Requests, rule: speculative.AcceptanceRule
) -> Iterator[DraftTree]:
    """The trees of three rounds."""
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance=rule)
    state = speculative.prefill(decoder, PARAMS, requests, num_slots=64)
    for _ in range(3):
        state, done = speculative.decode_round(decoder, PARAMS, state)
        yield jax.device_get(done.tree)


WHOLE: list[TreeConfig | Topology] = [
    TreeConfig(num_nodes=7, depth=2, width=2),  # Every candidate kept.
    from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]),
]


def expected_paths(
    model: ToyModel,
    noise: np.ndarray,
    calibration: Calibration,
    temperature: float,
    filters: dict[str, Any],
) -> dict[tuple[int, ...], float]:
    """Two children of the root 4 and two of each of these, with their path values."""
    known = np.array(model.known if isinstance(model, NarrowToyModel) else range(V))
    confidence = calibration.sampled if temperature else calibration.greedy
    found: dict[tuple[int, ...], float] = {}
    parents: dict[tuple[int, ...], float] = {(): 0.0}
    for level in (1, 2):
        children: dict[tuple[int, ...], float] = {}
        for path, value in parents.items():
            tokens = jnp.array([4, *path])
            total = path_code(tokens, jnp.arange(len(tokens))).sum(dtype=jnp.uint32)
            logits = np.asarray(model.logits((), total[None], level=1)).astype(
                np.float64
            )
            scores = logits + noise[level - 1][known]
            if temperature:
                scaled = confidence.sharpness * logits / temperature
                least = np.sort(scaled)[-filters.get("top_k", 0)]  # All for 0.
                least = max(least, scaled.max() + np.log(filters.get("min_p", 1e-30)))
                scores = np.where(scaled < least, -np.inf, scaled)
                scores = temperature * (scores + noise[level - 1][known])
            scores = confidence.kappa * scores
            log_probs = scores - np.logaddexp.reduce(scores)
            factors = np.asarray(confidence.factors(2, level=level))
            for rank, place in enumerate(np.argsort(-log_probs)[:2]):
                if log_probs[place] > -np.inf:
                    child = (*path, int(known[place]))
                    children[child] = value + factors[rank] * log_probs[place]
        found |= children
        parents = children
    return found


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The drafted paths of one row, with their values."""
    assert_valid_tree(tree)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tree.tokens)):
        if tree.is_node[node]:
            parent = paths[int(tree.parents[node])]
            paths[node] = (*parent, int(tree.tokens[node]))
    return {path: float(tree.log_values[n]) for n, path in paths.items() if path}


@pytest.mark.parametrize("model", [NEAR, NARROW], ids=["all tokens", "fewer tokens"])
@pytest.mark.parametrize("tree", WHOLE, ids=["dynamic", "static"])
def test_children_have_the_largest_sums_of_log_probability_and_noise(
    tree: TreeConfig | Topology, model: ToyModel
) -> None:
    """And `softmax(kappa * t * s)` at temperature `t` is their confidence."""
    is_dynamic = isinstance(tree, TreeConfig)
    # Exponents are for dynamic trees; these leave the order of siblings as it is.
    exponents = ((1.0, 2.0), (0.5, 0.75)) if is_dynamic else ((1.0,),)
    calibration = Calibration(
        greedy=Confidence(kappa=0.5, exponents=exponents[::-1]),
        sampled=Confidence(kappa=2.0, sharpness=1.3, exponents=exponents),
    )
    drafter = TreeDrafter(model=model, tree=tree, calibration=calibration)
    temperatures = [1.0, 0.4, 0.0, 1.5]
    noise = np.random.default_rng(0).gumbel(size=(4, 3, V)).astype(np.float32)
    noise[2] = 0
    propose = jax.jit(drafter.propose)
    every: list[dict[str, Any]] = [{}, {"top_k": 3}, {"min_p": 0.3}, {"top_k": 1}]
    for filters in every:
        draws = make_draws(4, jnp.array(noise), temperature=temperatures, **filters)
        state = drafter.init_state(4, 64)
        trees, _ = propose((), state, jnp.full(4, 4), draws)
        for row, temperature in enumerate(temperatures):
            settings = (calibration, temperature, filters)
            expected = expected_paths(model, noise[row], *settings)
            found = paths_of(jax.tree.map(lambda x, row=row: np.asarray(x[row]), trees))
            assert found == pytest.approx(expected, abs=1e-4)


def random_arrays(jaxpr: Any, *, in_loop: bool = False) -> Iterator[tuple[Any, bool]]:
    """The shapes of all random arrays that a program makes, and whether in a loop."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "random_bits":
            yield equation.outvars[0].aval.shape, in_loop
        is_loop = in_loop or equation.primitive.name in ("while", "scan")
        for inner in jaxprs_in_params(equation.params):
            yield from random_arrays(inner, in_loop=is_loop)


@pytest.mark.parametrize("name", ["dynamic", "static", "noise not shared"])
def test_noise_is_made_once_a_round_and_never_for_greedy_decoding(name: str) -> None:
    drafter, requests = DRAFTERS[name], requests_of(BATCHES[0])

    def made(rule: speculative.AcceptanceRule) -> list[tuple[Any, bool]]:
        settings = (Decoder(target=TARGET, drafter=drafter, acceptance=rule), PARAMS)
        prefill: Any = functools.partial(speculative.prefill, *settings, num_slots=64)
        one_round: Any = functools.partial(speculative.decode_round, *settings)
        state = jax.eval_shape(prefill, requests)
        jaxpr = jax.make_jaxpr(one_round)(state)
        return list(random_arrays(jaxpr.jaxpr))

    assert made("greedy") == []
    # One array for drafting and verification, whatever the nodes; not in the walk.
    assert made("coupled") == [((8, drafter.depth + 1, V), False)]


NUM_DRAWS = 20_000
DRAWN_TWIN = ToyModel(vocab_size=4, sharpness=1.0, seed=DRAWN_TARGET.seed)
DRAWN_OTHER = dataclasses.replace(DRAWN_TWIN, seed=7)


@pytest.mark.parametrize(
    ("model", "tree"),
    [
        (DRAWN_TWIN, TreeConfig(num_nodes=6, depth=2, width=2)),
        (DRAWN_OTHER, from_paths([(0,), (1,), (0, 0), (1, 0)])),
    ],
    ids=["right, dynamic", "wrong, static"],
)
def test_three_tokens_have_the_targets_joint_distribution(
    tree: TreeConfig | Topology, model: ToyModel
) -> None:
    for temperature, top_k in ((1.0, 0), (0.6, 3)):
        accepted = check_drawn_texts(
            TreeDrafter(model=model, tree=tree),
            PARAMS,
            rule="coupled",
            temperature=temperature,
            top_k=top_k,
            num_draws=NUM_DRAWS,
        )
        # The target's own model is right about both tokens after the first.
        assert accepted == 2 if model == DRAWN_TWIN else 0.25 < accepted < 1.9
