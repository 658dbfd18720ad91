"""Settings of single requests: stop strings, samples, defaults, and what is refused."""

import asyncio
import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import (
    Generation,
    Pair,
    StopReason,
    TreeConfig,
    assets,
    load_pair,
)
from eagle_jax.constraints import grammar
from eagle_jax.engine.request import Request, each_sample
from tests.conftest import Main
from tests.helpers import refused, settings_of

# Random drafts fit badly, which is told once they were judged.
pytestmark = pytest.mark.filterwarnings("ignore:the drafts")

PROMPT = "import os\n\n\ndef main():\n"
LENGTH = 24


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A trained model of two layers that drafts for itself: some drafts fail."""
    tree = TreeConfig(num_nodes=6, depth=4, width=2)
    config = settings_of(tree, method="small-model")
    return load_pair(str(assets.SMALL), str(assets.SMALL), config)


@pytest.fixture(scope="module")
def plain() -> Pair:
    config = settings_of(None, method="autoregressive")
    return load_pair(str(assets.SMALL), None, config)


@pytest.fixture(scope="module")
def small(tiny_pair: Path) -> Pair:
    tree = TreeConfig(num_nodes=6, depth=2, width=3)
    return load_pair(f"{tiny_pair}/target", f"{tiny_pair}/head", settings_of(tree))


@pytest.fixture(scope="module")
def small_plain(tiny_pair: Path) -> Pair:
    config = settings_of(None, method="autoregressive")
    return load_pair(f"{tiny_pair}/target", None, config)


@pytest.fixture(scope="module")
def whole(pair: Pair) -> Generation:
    (found,) = pair.generate(PROMPT, max_new_tokens=LENGTH, temperature=1.0, seed=5)
    return found


def asked(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": LENGTH, "temperature": 1.0, "seed": 5} | more


def places(found: Generation) -> list[str]:
    """What each token of a text was in its round."""
    kinds = ["prefill"]
    for accepted in found.accept_lengths:
        inner = ["first", *["middle"] * (accepted - 2), "last"]
        kinds += [*inner[:accepted], "bonus"]
    return kinds


def test_a_stop_token_ends_the_text_wherever_it_stands_in_a_round(
    pair: Pair, plain: Pair, whole: Generation
) -> None:
    seen = set()
    for token in dict.fromkeys(whole.token_ids):
        place = whole.token_ids.index(token)
        seen.add(places(whole)[place])
        for one in (pair, plain):
            (found,) = one.generate(PROMPT, **asked(stop_token_ids=[token]))
            assert found.token_ids == whole.token_ids[: place + 1]
            assert found.finish_reason == "stop"
    assert seen >= {"first", "middle", "last", "bonus"}


def test_a_stop_string_ends_the_text_before_it_wherever_it_stands(
    pair: Pair, plain: Pair, whole: Generation
) -> None:
    ends = [
        len(pair.generate(PROMPT, **asked(max_new_tokens=count))[0].text)
        for count in range(1, LENGTH + 1)
    ]
    seen, is_split = set(), False
    for start in range(0, len(whole.text) - 3, 3):
        stop = whole.text[start : start + 3]
        found, other = (
            one.generate(PROMPT, **asked(stop=stop))[0] for one in (pair, plain)
        )
        assert found.text == whole.text[: whole.text.index(stop)]
        count = next(n for n, end in enumerate(ends) if end >= len(found.text) + 3) + 1
        assert found.token_ids == whole.token_ids[:count]
        assert (found.finish_reason, found.stop_reason) == (
            "stop",
            StopReason.STOP_STRING,
        )
        assert (other.text, other.token_ids) == (found.text, found.token_ids)
        # No round after the one that brought it is counted.
        assert (
            len(places(found))
            >= count
            > len(places(found)) - sum(found.accept_lengths[-1:]) - 1
        )
        seen.add(places(whole)[count - 1])
        is_split |= count > 1 and ends[count - 2] > len(found.text)
    assert seen >= {"first", "middle", "last", "bonus"} and is_split


def test_a_stream_shows_nothing_of_a_stop_string(pair: Pair, whole: Generation) -> None:
    stop = whole.text[20:26]
    for keeps in (False, True):
        settings = asked(stop=["never there", stop], include_stop_str_in_output=keeps)
        pieces = list(pair.stream(PROMPT, **settings))
        (found,) = pair.generate(PROMPT, **settings)
        assert "".join(map(str, pieces)) == found.text
        assert found.text == whole.text[: whole.text.index(stop)] + stop * keeps
        assert [*itertools.chain(*(x.token_ids for x in pieces))] == found.token_ids
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (
            len(pieces) - 1
        )
        assert pieces[-1].generation == found


def test_a_special_token_given_as_a_stop_string_ends_the_text(
    small: Pair, small_plain: Pair
) -> None:
    special = small.tokenizer.convert_ids_to_tokens(298)
    settings = asked(logit_bias={298: 50.0}, min_new_tokens=3)
    for one in (small, small_plain):
        (found,) = one.generate(PROMPT, **settings, stop=special)
        assert (found.finish_reason, len(found.token_ids)) == ("stop", 4)
        (kept,) = one.generate(
            PROMPT, **settings, stop=special, include_stop_str_in_output=True
        )
        assert kept.text == found.text + special
        pieces = one.stream(
            PROMPT, **settings, stop=special, include_stop_str_in_output=True
        )
        assert "".join(map(str, pieces)) == kept.text
        (on,) = one.generate(PROMPT, **settings)
        assert len(on.token_ids) == LENGTH


def test_every_prompt_has_settings_of_its_own(small: Pair, small_plain: Pair) -> None:
    prompts = [PROMPT, "class A:\n", "x = "]
    settings = [
        small.request(**asked(n=2, presence_penalty=1.5)),
        small.request(max_new_tokens=9, stop_token_ids=[3, 7], no_repeat_ngram_size=2),
        small.request(
            max_new_tokens=12, temperature=0.7, top_k=5, stop="\n", min_p=0.01
        ),
    ]
    found = small.generate(prompts, settings)
    assert len(found) == 4
    assert [x.token_ids for x in small_plain.generate(prompts, settings)] == [
        x.token_ids for x in found
    ]
    (alone,) = small.generate(prompts[2], settings[2])
    assert alone == found[3]


def test_log_probabilities_are_those_of_plain_decoding(
    small: Pair, small_plain: Pair
) -> None:
    each = [
        small.request(**asked(logprobs=3, prompt_logprobs=1, presence_penalty=1.0)),
        small.request(max_new_tokens=9, stop="\n"),
        small.request(**asked(logprobs=0, n=2)),
    ]
    prompts = [PROMPT, PROMPT, "x"]
    found = small.generate(prompts, each)
    assert found[1].logprobs is None and found[0].prompt_logprobs is not None
    assert len(found[0].prompt_logprobs) == len(found[0].prompt_ids) - 1
    others = small_plain.generate(prompts, each)
    for text, other in zip(found, others, strict=True):
        for ours, theirs in zip(text.logprobs or [], other.logprobs or [], strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.top.keys() == theirs.top.keys()
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    pieces = [x for x in small.stream(prompts, each) if x.index == 0]
    told = [*itertools.chain(*(piece.logprobs or [] for piece in pieces))]
    assert [one.token_id for one in told] == found[0].token_ids
    assert {len(one.top) for one in told} == {3}


def test_an_engine_compiles_each_constraint_once_or_takes_it_compiled(
    small: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("outlines_core")
    engine, compiled = small.engine(batch_size=2), list[str]()
    compile_ = grammar._byte_automaton
    monkeypatch.setattr(
        grammar, "_byte_automaton", lambda x: compiled.append(x) or compile_(x)
    )
    for count in range(1, 11):
        one = small.request(max_new_tokens=20, regex=f"[xz]{{{count}}}")
        text = small.text(small.encode("x"), one, index=count)
        if count % 2:
            text.needs = text.needs.compiled(small)
        engine.add(text)
    assert len(compiled) == 10
    for text in engine.reset():
        engine.add(text)
    for text in engine.run():
        # Each is its own row's; the last is the stop token.
        assert len(text.token_ids) == text.index + 1
    assert len(compiled) == 10


def test_an_engine_serves_requests_that_share_nothing(small: Pair) -> None:
    pytest.importorskip("outlines_core")
    settings: list[dict[str, Any]] = [
        {},
        {"regex": "[ab]{4}", "temperature": 1.0},
        {"bad_words": ["self", "return"], "stop_token_ids": list(range(40, 60))},
        {"stop": "\n"},
    ]
    requests = [small.request(max_new_tokens=LENGTH, **one) for one in settings]
    engine = small.engine(batch_size=2)
    for number, one in enumerate(requests):
        text = small.text(small.encode(PROMPT), one, index=number)
        text.priority = -number // 2
        engine.add(text)
    found = {text.index: text.token_ids for text in engine.run()}
    for number, one in enumerate(requests):
        (alone,) = small.generate(PROMPT, one)
        assert found[number] == alone.token_ids, settings[number]


def test_a_cancelled_text_is_gone_wherever_it_was(small: Pair) -> None:
    engine, (alone,) = small.engine(batch_size=2), small.generate(PROMPT, **asked())
    ids, one = small.encode(PROMPT), small.request(**asked())
    a, b, c, d, nobody = (small.text(ids, one) for _ in range(5))
    for text in (a, b, c, d):
        text.is_watched = True
        engine.add(text)
    assert engine.step() == [a, b]
    assert engine.cancel(a) and engine.cancel(d)
    assert not engine.cancel(a) and not engine.cancel(nobody)
    ended = {text: text.token_ids for text in engine.run()}
    assert ended == dict.fromkeys((b, c), alone.token_ids)


def test_lower_priorities_come_first_and_equals_in_order(small: Pair) -> None:
    engine = small.engine(batch_size=1)
    for index, priority in enumerate((1, 0, 1, -1)):
        one = small.request(max_new_tokens=2)
        text = small.text(small.encode("x"), one, index=index)
        text.priority = priority
        engine.add(text)
    assert [text.index for text in engine.run()] == [3, 1, 0, 2]


def test_an_asynchronous_stream_is_the_stream(small: Pair) -> None:
    async def collect() -> list[str]:
        return [str(piece) async for piece in small.astream(["x", "y"], **asked())]

    assert asyncio.run(collect()) == [
        str(x) for x in small.stream(["x", "y"], **asked())
    ]


def test_results_tell_text_and_figures(whole: Generation) -> None:
    assert repr(whole).startswith(f"Generation({whole.text[:8]!r}"[:-1])
    assert f"{len(whole.prompt_ids)} + {LENGTH} tokens" in repr(whole)
    assert "per round, length)" in repr(whole) and len(repr(whole)) < 160
    read, rounds = len(whole.prompt_ids), len(whole.accept_lengths)
    assert [*whole.usage.values()] == [read, LENGTH, rounds]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stop": ""}, "stop holds ''"),
        ({"stop": ["a", 3]}, "stop holds 3"),
        ({"include_stop_str_in_output": True}, "`stop` holds none"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "at most max_new_tokens = 8"),
        ({"n": 0}, "n = 0 must be 1 to"),
        ({"n": 1.5}, "n = 1.5 must be a whole number"),
        ({"seed": -1}, "seed = -1"),
        ({"logprobs": -1}, "logprobs = -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty = 3.0"),
        ({"bad_words": [""]}, "bad_words holds ''"),
        ({"bad_words_ids": [[]]}, "lists of one id or more"),
        ({"bad_words_ids": [3]}, "must be lists of ids"),
        ({"regex": "a", "json_schema": {}}, "are both given"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids = 'x'"),
        ({"max_tokens": 3}, "'max_tokens' is no setting; known are"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    pair: Pair, settings: dict[str, Any], named: str
) -> None:
    refused(lambda: pair.request(**settings), named)


def test_what_does_not_belong_together_is_refused(pair: Pair) -> None:
    one = pair.request()
    refused(lambda: pair.generate(["a", "b"], [one]), "1 requests", "2 prompts")
    refused(
        lambda: pair.generate("a", one, top_k=2), "top_k is given beside `settings`"
    )
    refused(lambda: pair.generate("a", logit_bias={5000: 1.0}), "logit_bias", "5000")
    refused(lambda: pair.generate("a", logprobs=2049), "at most 2048")
    refused(lambda: pair.engine(max_length=100_000), "100000", "512 positions")
    engine = pair.engine(batch_size=1, max_length=64)
    text = pair.text([5] * 64, one)
    refused(lambda: engine.add(text), "64 tokens", "may have 64")
    # What would break a step is refused before.
    biased = pair.request(logit_bias={5000: 1.0})
    refused(lambda: pair.text([5], biased), "logit_bias", "5000")
    wrong = pair.text([5], pair.request(regex="("))
    refused(lambda: engine.add(wrong), "cannot be compiled")
    assert engine.is_idle


def test_the_command_reads_settings_of_flags_lines_and_standard_input(
    main: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_pair: Path,
    small: Pair,
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    lines = [
        {"prompt": PROMPT, "settings": {"n": 2, "temperature": 1.0, "seed": 5}},
        {"prompt": "x = ", "settings": {"stop": ["e"]}},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--max-new-tokens", str(LENGTH), "--json", str(out), "--batch-size", "2"]
    flags += ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/head"]
    flags += ["--num-nodes", "6", "--depth", "2", "--width", "3"]
    assert main(["--prompts", str(prompts), "--stop", "never", *flags]) == 0
    runs = json.loads(out.read_text())["runs"]
    wanted = small.generate(PROMPT, **asked(n=2, stop="never"))
    wanted += small.generate("x = ", max_new_tokens=LENGTH, stop="e")
    assert [(run["text"], run["seed"]) for run in runs[:2]] == [
        (text.text, text.seed) for text in wanted[:2]
    ]
    assert runs[2]["text"] == wanted[2].text
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff" + PROMPT))
    assert main(["--prompts", "-", *flags, "--logit-bias", "11=-5"]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    biased = small.generate(PROMPT, max_new_tokens=LENGTH, logit_bias={11: -5.0})
    assert run["text"] == biased[0].text
    assert main(["--prompt", "x", *flags, "--logit-bias", "1_1=-5"]) == 2


def test_seeds_of_samples_go_on_with_0_after_the_last(small: Pair) -> None:
    last = Request(n=2, seed=2**32 - 2)
    seeds = [one.seed for _, one in each_sample([[1]] * 2, last)]
    assert seeds == [2**32 - 2, 2**32 - 1, 0, 1]
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 4}
    found = small.generate("x", n=2, seed=2**32 - 1, **settings)
    alone = [*small.generate("x", seed=2**32 - 1, **settings)]
    alone += small.generate("x", seed=0, **settings)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]


def test_settings_are_what_they_are_given_as() -> None:
    one = Request(stop="a", stop_token_ids=[1, 2], logit_bias={3: 1.0})
    assert (one.stop, one.stop_token_ids) == (("a",), (1, 2))
    assert dataclasses.replace(one, n=2).stop == ("a",)
