"""Each token's text: together they are the text, for tokenizers of five kinds."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_jax.engine.spelling import Spelling
from eagle_jax.engine.wording import continuation

_SPECIAL = ["<s>", "</s>", "<unk>"]
_WORDS = ["▁", "▁a", "▁the", "a", "b", "▁▁", "é", "€", "▁😀", "\n", "."]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level() -> Tokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("â", "Ĥ"), ("ð", "Ł"), ("Ã", "©"), ("ï", "¿")]
    symbols += ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE({x: n for n, x in enumerate(symbols)}, merges))
    backend.decoder = decoders.ByteLevel()
    return backend


def _metaspace_bytes() -> Tokenizer:
    vocabulary = {x: n for n, x in enumerate([*_BYTES, *_WORDS])}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parts = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts])
    return backend


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((x, -1.0) for x in _WORDS)]))
    backend.decoder = decoders.Metaspace()
    return backend


def _wordpiece() -> Tokenizer:
    symbols = ["<unk>", "the", "a", "##b", "##é", ".", "n't", "'", "##s", "😀", "�"]
    vocabulary = {x: n for n, x in enumerate(symbols)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return backend


def _words() -> Tokenizer:
    symbols = ["<unk>", "the", "a", "é", "😀", ".", "�"]
    vocabulary = {x: n for n, x in enumerate(symbols)}
    return Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))


_KINDS = {
    "byte-level": _byte_level,
    "Llama 2": _metaspace_bytes,
    "T5": _unigram,
    "BERT": _wordpiece,
    "words": _words,
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    """One of each kind, with special and added tokens."""
    made = {}
    for kind, make in _KINDS.items():
        backend = make()
        backend.add_special_tokens(_SPECIAL)
        backend.add_tokens(["<tool>", "ééé"])
        made[kind] = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
        )
    return made


def spelled(tokenizer: Any, prompt: list[int], ids: list[int], skips: bool) -> Any:
    spelling = Spelling(tokenizer, prompt, skips=skips)
    alone = [(spelling.bytes_of(one), *spelling.add(one)) for one in ids]
    assert all(would == did for would, did, _ in alone)
    return [did for _, did, _ in alone], [place for *_, place in alone]


def check(tokenizer: Any, prompt: list[int], ids: list[int], skips: bool) -> None:
    text = continuation(tokenizer, prompt, ids, skip_special_tokens=skips)
    found, places = spelled(tokenizer, prompt, ids, skips)
    assert b"".join(found).decode(errors="replace") == text
    for place, one in zip(places, found, strict=True):
        whole = one.decode(errors="ignore")
        assert place <= len(text)
        if whole.encode() == one:  # No part of a character.
            assert text[place:].startswith(whole)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("kind", _KINDS)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_tokens_together_are_the_text_whatever_a_decoder_does_between_them(
    tokenizers: dict[str, Any], kind: str, skips: bool, data: Any
) -> None:
    tokenizer = tokenizers[kind]
    piece = st.integers(0, len(tokenizer) - 1).map(lambda one: [one])
    if kind in ("byte-level", "Llama 2"):  # Bytes alone of what is a character.
        byte = _byte_ids(tokenizer, kind)
        many = st.sampled_from("é€😀\n")
        piece = many.map(lambda x: [byte[one] for one in x.encode()])
        piece |= st.integers(256, len(tokenizer) - 1).map(lambda one: [one])
    pieces = st.lists(piece, max_size=30).map(lambda x: [*itertools.chain(*x)])
    check(tokenizer, [0, *data.draw(pieces)], data.draw(pieces), skips)


def _byte_ids(tokenizer: Any, kind: str) -> dict[int, int]:
    if kind == "Llama 2":
        return {byte: byte for byte in range(256)}
    raw = Spelling(tokenizer, [0])._raw
    return {found[0]: id_ for id_ in range(256) if (found := raw(id_))}
