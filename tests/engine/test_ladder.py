"""Trees that choose themselves: the texts are the same, whatever is chosen."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax import Pair, TreeConfig, assets, load_pair
from eagle_jax.decoding import growth
from eagle_jax.decoding.speculative import decode_until
from eagle_jax.decoding.state import StopReason
from eagle_jax.engine import PairConfig, programs
from eagle_jax.engine.choice import TRIAL, Stretch
from eagle_jax.engine.config import AutoTree
from eagle_jax.engine.ladder import ROOT, Chooser, chooser_of, ladder_of
from eagle_jax.engine.programs import Programs, Store
from tests.engine.test_programs import let_compiling_take
from tests.helpers import refused, settings_of

# Random drafts fit badly, which is told once they were judged.
pytestmark = pytest.mark.filterwarnings("ignore:the drafts")

SMALL = TreeConfig(num_nodes=6, depth=3, width=2)
PROMPTS = ["import os\n\n\ndef main():\n", "class A", "x = 1\ny = 2\nx = 1\ny", "#"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A trained model of two layers that drafts for itself: some drafts fail."""
    config = settings_of(AutoTree(settings=SMALL), method="small-model")
    return load_pair(str(assets.SMALL), str(assets.SMALL), config)


@pytest.fixture(scope="module")
def plain() -> Pair:
    config = settings_of(None, method="autoregressive")
    return load_pair(str(assets.SMALL), None, config)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 0.7, "regex": "[a-z =(]{4,40}"},
    ],
    ids=["greedy", "penalties", "regex"],
)
def test_texts_are_plain_decodings_while_trees_change_at_random(
    pair: Pair,
    plain: Pair,
    rows: int,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    settings: Any = {"max_new_tokens": 40, "seed": 5} | asked

    def draw(self: Chooser, *_: Any) -> tuple[int, int]:
        return int(rng.integers(3)), int(rng.integers(1, 4))

    monkeypatch.setattr(Chooser, "next", draw)
    pair = dataclasses.replace(pair, kept={})
    found = pair.generate(PROMPTS, batch_size=rows, **settings)
    expected = plain.generate(PROMPTS, batch_size=rows, **settings)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.finish_reason == other.finish_reason
        ours, theirs = ([x.logprob for x in y.logprobs or ()] for y in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert sum(one.trees.values()) == len(one.accept_lengths)
    labels = set[str]().union(*(one.trees for one in found))
    assert labels == {ROOT, "4/3/1", "6/3/2"}


@pytest.mark.parametrize("looked_at", ["keeps_rounds", "is_watched"])
def test_each_round_drafts_the_tree_that_it_is_told_of(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, looked_at: str
) -> None:
    """The text would be the same with any."""
    turns = itertools.cycle([(0, 2), (1, 2), (2, 2)])
    monkeypatch.setattr(Chooser, "next", lambda *_: next(turns))
    fresh = dataclasses.replace(pair, kept={})
    (text,) = fresh.texts(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    setattr(text, looked_at, True)
    fresh.engine(batch_size=1, max_length=128).write([text])
    nodes = {ROOT: 1, "4/3/1": 4, "6/3/2": 6}
    sizes = [nodes[label] for label in text.trees]
    assert {*sizes} == {1, 4, 6}
    if text.rounds:
        assert sizes == [one.tree.tokens.shape[0] for one, _ in text.rounds]
    brought = zip(text.trees, text.accept_lengths, strict=True)
    assert {label for label, count in brought if count} == {"4/3/1", "6/3/2"}


def test_rounds_that_a_stop_string_cuts_off_are_no_rounds_of_a_tree(pair: Pair) -> None:
    (whole,) = pair.generate(PROMPTS[0], max_new_tokens=40)
    stop = whole.text[12:15]
    (done,) = pair.generate(PROMPTS[0], max_new_tokens=40, stop=[stop])
    assert done.finish_reason == "stop" and whole.text.startswith(done.text)
    rounds = len(done.accept_lengths)
    assert sum(done.trees.values()) == rounds < len(whole.accept_lengths)


def test_rounds_that_are_looked_at_are_learnt_from(pair: Pair) -> None:
    fresh = dataclasses.replace(pair, kept={})
    (text,) = fresh.texts(PROMPTS[0], max_new_tokens=80, ignore_eos=True)
    text.keeps_rounds = True
    fresh.engine(batch_size=1, max_length=128).write([text])
    chooser = chooser_of(fresh, "greedy")
    assert chooser is not None
    assert chooser.known.figures.costs


def test_texts_within_a_stretch_are_learnt_from_but_for_a_first_round(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short texts never get to its end; a program that is new takes longer once."""
    monkeypatch.setattr(programs, "PROGRAMS", Store())
    fresh = dataclasses.replace(pair, kept={})
    for count in range(1, 4):
        (text,) = fresh.generate(PROMPTS[0], max_new_tokens=9, ignore_eos=True)
        assert len(text.accept_lengths) <= TRIAL
        chooser = chooser_of(fresh, "greedy")
        assert chooser is not None
        # The first token is the prompt's.
        not_learnt = text.accept_lengths[0] + 1
        assert chooser.known.figures.tokens == 8 * count - not_learnt


def test_the_root_alone_is_expected_to_compile_sooner(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []

    def draw(_: Chooser, batch: int, left: int, costs: Any, *has: Any) -> Any:
        seen.append(costs())
        return len(seen) - 1, 1

    monkeypatch.setattr(programs, "PROGRAMS", Store())
    monkeypatch.setattr(programs, "_LAST_SECONDS", {decode_until: 5.0})
    monkeypatch.setattr(Chooser, "next", draw)
    let_compiling_take(6.0, monkeypatch)
    fresh = dataclasses.replace(pair, kept={})
    engine = fresh.engine(batch_size=1, max_length=128)
    engine.add(*fresh.texts(PROMPTS[0], max_new_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert seen == [[3.0, 5.0, 5.0], [0.0, 10.0, 10.0], [0.0, 0.0, 6.0]]


def test_rounds_of_a_smaller_tree_leave_room_for_the_largest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafter reads as much after them, and may write over nothing."""
    run, free = Programs.decode_until, list[int]()

    def noted(*arguments: Any) -> Any:
        state = run(*arguments)
        if state.stop_reason[0] == StopReason.RUNNING:
            free.append(state.tokens.shape[1] - int(state.lengths[0]))
        return state

    monkeypatch.setattr(growth, "FIRST_LENGTH", 100)
    monkeypatch.setattr(Chooser, "next", lambda *_: (0, 1000))
    monkeypatch.setattr(Programs, "decode_until", noted)
    fresh = dataclasses.replace(pair, kept={})
    texts = fresh.texts(PROMPTS[0], max_new_tokens=150, ignore_eos=True)
    fresh.engine(batch_size=1, max_length=180).write(texts)
    assert {*free} == {SMALL.depth}


def test_streams_change_trees_too(pair: Pair, plain: Pair) -> None:
    settings: Any = {"max_new_tokens": 30, "temperature": 1.0, "seed": 7}
    *_, last = pair.stream(PROMPTS[0], **settings)
    (expected,) = plain.generate(PROMPTS[0], **settings)
    assert last.generation is not None
    assert last.generation.token_ids == expected.token_ids


def test_a_trial_lasts_its_rounds_however_few_are_run_at_once() -> None:
    config = settings_of(AutoTree(settings=SMALL), method="small-model")
    pair = load_pair(str(assets.SMALL), str(assets.SMALL), config, is_lazy=True)
    chooser = chooser_of(pair, "greedy")
    assert chooser is not None
    chosen = []
    for _ in range(TRIAL):
        tree, _ = chooser.next(1, 1000, lambda: [0.0] * 3)
        chooser.record(Stretch(1, 1, 1, 0.01))
        chosen.append(tree)
    assert len({*chosen}) == 1
    assert not chooser.known.figures.costs
    chooser.next(1, 1000, lambda: [0.0] * 3)
    assert chooser.known.figures.cost(chosen[0], 1) == pytest.approx(0.01)


def test_only_trees_without_sizes_choose_themselves(tiny_pair: Path) -> None:
    def labels(rule: Any = "coupled", **settings: Any) -> list[str]:
        folder, head = f"{tiny_pair}/target", f"{tiny_pair}/head"
        free = ("autoregressive", "lookup", "lookahead", "recycling")
        draft = None if settings.get("method") in free else head
        pair = load_pair(folder, draft, is_lazy=True, **settings)
        return [rung.label for rung in ladder_of(pair, rule)]

    every = [ROOT, "4/3/1", "7/6/1", "26/6/4", "60/6/10"]
    assert labels() == labels(tree="auto") == labels(shared_noise=False) == every
    assert labels(method="lookup", max_ngram=2) == every
    assert labels(method="chain") == [ROOT, "4 nodes", "7 nodes"]
    assert labels(method="eagle1") == [ROOT, "26 nodes"]
    assert labels(method="recycling") == [ROOT, "81 nodes"]
    assert labels(method="lookahead") == [ROOT, "56 nodes"]
    assert labels(method="lookahead", level=3) == ["28 nodes"]
    # The text would depend on what is chosen.
    assert labels(rule="rejection") == ["60/6/10"]
    assert labels(num_nodes=8) == ["8/6/10"]
    assert labels(tree=SMALL) == ["6/3/2"]
    assert labels(num_nodes=9, depth=2, width=3) == ["9/2/3"]
    assert labels(method="autoregressive") == [ROOT]


def test_a_tree_that_chooses_itself_is_given_no_sizes() -> None:
    given: Any = {"tree": "auto", "num_nodes": 8}
    refused(lambda: PairConfig().with_(**given), 'tree = "auto" chooses `num_nodes`')
    config = PairConfig().with_(num_nodes=8).with_(tree="auto")
    assert config.tree == AutoTree(settings=TreeConfig(num_nodes=8))
    assert config.fixed.tree == TreeConfig(num_nodes=8)
    config = PairConfig()
    assert config == PairConfig(tree="auto") == config.with_(tree="auto")
    # By way of plain decoding, too.
    assert config.with_method("autoregressive").with_method("eagle2") == config
    kept = config.with_(calibration="none").with_method("small-model")
    assert kept.tree == AutoTree(settings=TreeConfig(calibration="none"))
