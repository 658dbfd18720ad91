"""From an expression to an automaton: it allows what Python's `re` matches."""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.constraints import grammar
from eagle_jax.constraints.automaton import DEAD, START, TokenAutomaton
from eagle_jax.engine.request import Request
from eagle_jax.engine.wording import load_tokenizer
from tests.helpers import refused

pytest.importorskip("tokenizers")
pytest.importorskip("outlines_core")

STOP = 9
PIECES = ["a", "b", "ab", "bc", "é", "\u2581", "\u2581a", "<0xC3>", "<0xA9>", "</s>"]
WRITTEN = [b"a", b"b", b"ab", b"bc", "é".encode(), b" ", b" a", b"\xc3", b"\xa9"]


def tokenizer(decoder: Any, pieces: list[str] = PIECES) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.decoder = decoder
    made.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def sentencepiece(pieces: list[str] = PIECES) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback()]
    return tokenizer(decoders.Sequence([*steps, decoders.Fuse()]), pieces)


def compiled(
    regex: str | None = None, *, stops: tuple[int, ...] = (STOP,), **named: Any
) -> Any:
    known = named.pop("tokenizer", None) or sentencepiece()
    given = Request(regex=regex, **named).grammar
    assert given is not None
    return grammar.compile_grammar(known, stops, 40, given)


def test_the_bytes_of_sentencepiece_tokens() -> None:
    found = grammar.token_bytes(sentencepiece(), 40)
    assert found == [*WRITTEN, *[None] * 31]
    # Tokens that were added beyond the target's have no column.
    assert grammar.token_bytes(sentencepiece(), 5) == WRITTEN[:5]


def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(tiny_pair: Path) -> None:
    tokenizer = load_tokenizer(tiny_pair / "target", 300)
    text = "é \n\x00" + "".join(map(chr, range(256))) + "\U0001f600"
    written = grammar.token_bytes(tokenizer, 300)
    ids = tokenizer(text).input_ids
    assert b"".join(written[number] or b"" for number in ids) == text.encode()
    assert written[298:] == [None, None]


@pytest.mark.parametrize(
    "regex",
    ["", "a*", "(ab|bc)+", " ?(a|é){1,2}", "a.", "a|ab", "[^a]b?", "ab(?:c|ab)?|é"],
)
def test_what_may_end_is_what_matches(regex: str) -> None:
    tables = compiled(regex)
    table, class_of = np.asarray(tables.next_state), np.asarray(tables.class_of)
    for length in range(4):
        for tokens in itertools.product(range(STOP), repeat=length):
            state = START
            for token in tokens:
                state = table[state, class_of[token]]
            may_end = table[state, class_of[STOP]] != DEAD
            text = b"".join(WRITTEN[token] for token in tokens)
            try:
                matches = re.fullmatch(regex, text.decode())
            except UnicodeDecodeError:
                matches = None
            assert may_end == (matches is not None), (regex, text)


@pytest.mark.parametrize("regex", ["a(b|x)", "(a|ax+)", "(a|b)*"])
def test_masks_are_what_leads_on_and_every_state_has_a_way_out(regex: str) -> None:
    tables = compiled(regex)
    table, class_of = np.asarray(tables.next_state), np.asarray(tables.class_of)
    seen, waiting = {DEAD}, [START]
    while waiting:
        if (state := waiting.pop()) in seen:
            continue
        seen.add(state)
        mask = np.asarray(TokenAutomaton(vocab_size=40).mask(tables, jnp.array(state)))
        np.testing.assert_array_equal(mask, table[state, class_of] != DEAD)
        # Nothing is written with `x`, so no state may wait for one.
        assert mask.any()
        waiting += table[state].tolist()


def test_a_schema_allows_its_json_alone() -> None:
    pieces = ['"', "a", "b", "{", "}", ":", "1", "true", ",", "</s>"]
    tables = compiled(
        json_schema={"enum": ["a", "ab", 1]}, tokenizer=sentencepiece(pieces)
    )
    table, class_of = np.asarray(tables.next_state), np.asarray(tables.class_of)

    def allows(text: list[str]) -> bool:
        state = START
        for piece in [*text, "</s>"]:
            state = table[state, class_of[pieces.index(piece)]]
        return bool(state != DEAD)

    assert allows(['"', "a", '"']) and allows(['"', "a", "b", '"']) and allows(["1"])
    assert not any(map(allows, (["a"], ['"', "b", '"'], ["1", "1"], ["true"], [])))


@pytest.mark.parametrize(
    "named, words",
    [
        ({"regex": "("}, ["`regex` '('", "outlines-core"]),
        ({"regex": "a(?=b)"}, ["`regex` 'a(?=b)'", "outlines-core"]),
        ({"regex": "x"}, ["no text", "tokens"]),
        ({"json_schema": {"type": "foo"}}, ["json_schema", "foo"]),
        ({"json_schema": "{"}, ["json_schema", "JSON"]),
        ({"json_schema": {"enum": {1}}}, ["`json_schema` is no JSON", "type set"]),
        ({"regex": b"a"}, ["`regex` or", "is no JSON", "type bytes"]),
        ({"regex": "a", "json_schema": "{}"}, ["both"]),
        ({"regex": "a", "stops": ()}, ["stop token", "eos_token_id"]),
        ({"regex": "a", "stops": (40, 41)}, ["stop token", "size, 40", "eos_token_id"]),
        ({"regex": "a)|(b"}, ["`regex` 'a)|(b'", "outlines-core"]),
    ],
)
def test_what_cannot_be_followed_is_refused(
    named: dict[str, Any], words: list[str]
) -> None:
    refused(lambda: compiled(**named), *words)


def test_too_large_automata_are_refused_with_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_BYTES", 400)
    refused(lambda: compiled("(a|b){50}"), "states and", "classes", "MiB")
    # Memory ends in the library's own code, then in Python's.
    for megabytes in (64, 256):
        monkeypatch.setattr(grammar, "_MAX_MEMORY", megabytes * 2**20)
        allowed = f"{megabytes / 1024:g} GiB are allowed"
        refused(lambda: compiled(".{0,3000}"), "cannot be compiled", allowed)
    monkeypatch.setattr(grammar, "_MAX_SECONDS", 0.01)
    refused(lambda: compiled("(ab?.){0,999}"), "it takes too long; 0.01 s")


def test_the_same_expression_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = sentencepiece()
    made = compiled("a|b", tokenizer=known), compiled("b", tokenizer=known)
    monkeypatch.setattr(grammar.subprocess, "run", None)
    again = compiled("a|b", tokenizer=known), compiled("b", tokenizer=known)
    assert made[0] is again[0] and made[1] is again[1]


def test_modules_in_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("outlines_core", "json", "contextlib"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    for others in (os.environ.get("PYTHONPATH", ""), os.pathsep):  # Empty: this folder.
        monkeypatch.setenv("PYTHONPATH", others)
        assert compiled("a") is not None
    assert not (tmp_path / "ran").exists()


def test_a_missing_library_and_an_unknown_tokenizer_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import decoders

    words = tokenizer(decoders.WordPiece())
    refused(lambda: compiled("a", tokenizer=words), "byte-level", "sentencepiece")
    (tmp_path / "outlines_core.py").write_text("raise ImportError('no such part')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused(lambda: compiled("a"), "outlines-core", "no such part", "'.[grammar]'")
