"""Text in, text out, from Python."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import Pair, StopReason, TreeConfig, assets, load_pair
from eagle_jax.engine.programs import PROGRAMS
from tests.helpers import refused, settings_of

SETTINGS: dict[str, Any] = {"max_new_tokens": 12}


TREE = TreeConfig(num_nodes=6, depth=2, width=3)


MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def make_pair(tiny_pair: Path) -> MakePair:
    def make(method: str = "eagle2") -> Pair:
        config = settings_of(TREE, method=method)
        draft = f"{tiny_pair}/head" if config.method_row.weights else None
        return load_pair(f"{tiny_pair}/target", draft, config)

    return make


@pytest.fixture(scope="module")
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


def test_texts_of_one_and_of_many_prompts_are_the_same(pair: Pair) -> None:
    prompts = ["def main():", "import os\n", "class A"]
    together = pair.generate(prompts, **SETTINGS)
    assert [done.text for done in together] == [
        pair.generate(prompt, **SETTINGS)[0].text for prompt in prompts
    ]
    for done in together:
        assert len(done.token_ids) == 12
        assert done.stop_reason == StopReason.MAX_TOKENS
        assert sum(done.accept_lengths) + len(done.accept_lengths) >= 11


def test_ids_are_taken_as_they_are(pair: Pair) -> None:
    ids = pair.tokenizer("def main():").input_ids
    (by_ids,) = pair.generate(ids, **SETTINGS)
    (by_text,) = pair.generate("def main():", **SETTINGS)
    assert by_ids == by_text
    assert by_ids.prompt_ids == ids
    for array in (np.array(ids), jnp.array(ids), np.array([ids]), [np.array(ids)]):
        assert pair.generate(array, **SETTINGS) == [by_text]


def test_a_message_alone_is_a_conversation(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.tokenizer.chat_template = (
        "{{ bos_token }}{{ messages[0].role + messages[0].content }}"
    )
    message = {"role": "user", "content": ": Hi"}
    expected = pair.generate("user: Hi", **SETTINGS)
    for prompts in (message, [message], [[message]]):
        assert pair.generate(prompts, **SETTINGS) == expected
    _, second = pair.generate(["user: Hi", message], **SETTINGS)
    assert second.text == expected[0].text
    assert "".join(map(str, pair.stream(message, **SETTINGS))) == expected[0].text


def test_settings_of_none_and_top_k_of_minus_one_are_off(pair: Pair) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3} | SETTINGS
    expected = pair.generate("import ", **settings)
    off: Any = dict.fromkeys(["top_p", "min_p", "acceptance", "max_length"])
    for top_k in (None, -1):
        assert pair.generate("import ", **settings, **off, top_k=top_k) == expected


def test_a_text_matches_its_expression_or_schema(make_pair: MakePair) -> None:
    pytest.importorskip("outlines_core")
    speculative, plain = make_pair("lookup"), make_pair("autoregressive")
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0}
    regex, schema = "[a-c]{3,9}(x|é)", {"enum": [12, "abcabc", None]}
    found = speculative.generate(["ab", "x"], regex=regex, **settings)
    compiled = PROGRAMS.compile_seconds
    found += speculative.generate(["ab", "x"], json_schema=schema, **settings)
    # Tables are parameters: another grammar runs the same program.
    assert PROGRAMS.compile_seconds == compiled
    assert found == [
        dataclasses.replace(done, accept_lengths=ours.accept_lengths)
        for done, ours in zip(
            plain.generate(["ab", "x"], regex=regex, **settings)
            + plain.generate(["ab", "x"], json_schema=schema, **settings),
            found,
            strict=True,
        )
    ]
    assert all(done.stop_reason == StopReason.STOP_TOKEN for done in found)
    assert all(re.fullmatch(regex, done.text) for done in found[:2])
    assert all(json.loads(done.text) in schema["enum"] for done in found[2:])
    pieces = speculative.stream("ab", json_schema=schema, **settings)
    assert "".join(map(str, pieces)) == found[2].text


def test_all_pairs_share_one_limit_of_programs(pair: Pair, make_pair: MakePair) -> None:
    PROGRAMS.clear()
    pair.generate("x", **SETTINGS)
    first = PROGRAMS.num_kept
    make_pair("autoregressive").generate("x", **SETTINGS)
    assert PROGRAMS.num_kept > first > 0


def test_a_warm_pair_compiles_nothing_more(make_pair: MakePair) -> None:
    pair = make_pair()
    assert pair.warm_up(90, batch_size=3, max_new_tokens=12) > 0
    before = PROGRAMS.compile_seconds
    for prompts in ([[1]], [[1] * 64, [1] * 65], [[1] * 90, [1], [1]], [[7]] * 4):
        pair.generate(prompts, max_new_tokens=12)
        pair.generate(prompts, max_new_tokens=3)
    assert PROGRAMS.compile_seconds == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_joins_to_the_text(pair: Pair, temperature: float) -> None:
    settings: dict[str, Any] = {"temperature": temperature, "seed": 4} | SETTINGS
    pieces = list(pair.stream("def main():", **settings))
    (done,) = pair.generate("def main():", **settings)
    assert "".join(map(str, pieces)) == done.text
    assert pieces[-1].generation == done
    assert len(pieces) > 1
    size = f"{len(pieces[-1].token_ids)} tokens, length"
    assert repr(pieces[-1]) == f"Piece(0, {pieces[-1].text!r}, {size})"


def test_a_pair_shows_its_sizes_and_its_method(pair: Pair) -> None:
    assert repr(pair) == "Pair('target', 1 layers of 32, float32, eagle2 2 deep)"


def test_a_random_seed_is_told_and_draws_the_same_text_again(pair: Pair) -> None:
    settings: dict[str, Any] = {"temperature": 1.0} | SETTINGS
    found = pair.generate(["x", "x"], seed=None, **settings)
    other = pair.generate("x", seed=None, **settings)[0]
    assert len({done.seed for done in [*found, other]}) == 3
    assert found[0].seed + 1 == found[1].seed and found[0].text != found[1].text
    for done in found:
        assert pair.generate("x", seed=done.seed, **settings) == [done]


@pytest.mark.parametrize(
    ("prompts", "settings", "named"),
    [
        ([], {}, "no prompts"),
        ([[]], {}, "no prompts"),
        (
            "x",
            {"temprature": 1.0},
            "'temprature' is no setting; known are max_new_tokens",
        ),
        ("x", {"temperature": -1.0}, "temperature = -1"),
        ("x", {"temperature": "0.7"}, "temperature = '0.7' must be float"),
        ("x", {"acceptance": "zz"}, "must be one of 'coupled', 'rejection'"),
        ("x", {"batch_size": 0}, "batch_size = 0"),
        ("x", {"batch_size": 2.5}, "batch_size = 2.5 must be int"),
        (None, {}, "None is no prompt; give a text, token ids, the messages of a"),
        (b"ab", {}, "b'ab' is no prompt"),
        (3, {}, "3 is no prompt"),
        ("xyz", {"max_length": 2}, "raise `max_length`"),
        ("x", {"max_length": 10**6}, "positions"),
        (["a", [5] * 257], {}, "256 positions"),
        ("x", {"chat": True}, "conversations need a chat template"),
        ([[5000]], {}, "the id 5000"),
        ([[0.5]], {}, "the id 0.5"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    pair: Pair, prompts: object, settings: dict, named: str
) -> None:
    wrong: Any = prompts
    refused(lambda: pair.generate(wrong, **settings), named)


def test_weights_that_a_method_does_not_read_are_told() -> None:
    target = str(assets.SMALL)
    with pytest.warns(UserWarning, match="without weights: `draft` nowhere is not"):
        pair = load_pair(target, "nowhere", method="lookup")
    alone = load_pair(target, method="lookup")
    assert pair.generate("x", **SETTINGS) == alone.generate("x", **SETTINGS)
