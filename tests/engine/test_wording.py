import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle_jax.engine import wording
from eagle_jax.engine.wording import load_tokenizer
from tests.helpers import refused

_BOS, _EOS = 298, 299
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: Path) -> Any:
    """The tiny pair's tokenizer."""
    return load_tokenizer(tiny_pair / "target", 300)


@pytest.fixture(scope="module")
def fallback_tokenizer() -> Any:
    """A tokenizer of Llama 2's kind: words, and bytes for all else."""
    symbols = ["<unk>", "<s>", "</s>"]
    symbols += [f"<0x{byte:02X}>" for byte in range(256)]
    symbols += ["▁", "a", "b", "▁a", "€"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={symbol: index for index, symbol in enumerate(symbols)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )


@pytest.fixture
def silent_tokenizer(tiny_pair: Path, tmp_path: Path) -> Any:
    """The same tokenizer, adding nothing to a text."""
    folder = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    tokenizer = load_tokenizer(folder, 300)
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer


def _bytes(tokenizer: Any, written: str) -> list[int]:
    """Returns one id per byte, whatever the merges."""
    alphabet = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    symbols = "".join(piece for piece, _ in alphabet(written))
    return [tokenizer.convert_tokens_to_ids(symbol) for symbol in symbols]


def test_encoding_begins_a_text_as_the_tokenizer_does(tokenizer: Any) -> None:
    ids = wording.encode(tokenizer, "the end", chat=False)
    assert ids[0] == _BOS
    assert len(ids) < 1 + len("the end"), "merges are used"
    assert tokenizer.decode(ids[1:]) == "the end"


def test_prompts_without_a_token_or_a_template_are_refused(
    tokenizer: Any, silent_tokenizer: Any
) -> None:
    assert wording.encode(tokenizer, "", chat=False) == [_BOS]
    named = ("prompt '' has no token", "give a prompt")
    refused(lambda: wording.encode(silent_tokenizer, "", chat=False), *named)
    named = ("conversations need a chat template",)
    refused(lambda: wording.encode(tokenizer, "Hello", chat=True), *named)


def test_chat_wraps_the_prompt_and_begins_the_text_once(silent_tokenizer: Any) -> None:
    silent_tokenizer.chat_template = _TEMPLATE
    ids = wording.encode(silent_tokenizer, "Hello", chat=True)
    assert ids[0] == _BOS
    assert _BOS not in ids[1:]
    assert silent_tokenizer.decode(ids[1:]) == "[user]Hello[assistant]"
    turns = [{"role": "user", "content": "Hello"}]
    assert wording.encode(silent_tokenizer, turns, chat=True) == ids


def test_continuations_leave_out_the_prompt_and_special_tokens(tokenizer: Any) -> None:
    prompt = wording.encode(tokenizer, "Once", chat=False)
    generated = [*_bytes(tokenizer, " upon"), _EOS]
    assert wording.continuation(tokenizer, prompt, generated) == " upon"
    assert wording.continuation(tokenizer, prompt, []) == ""


def test_continuations_keep_the_space_that_sentencepiece_hides(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "models" / "stories260K", 512)
    prompt = wording.encode(tokenizer, "Once upon", chat=False)
    whole = wording.encode(tokenizer, "Once upon a time", chat=False)
    assert whole[: len(prompt)] == prompt
    generated = whole[len(prompt) :]
    assert wording.continuation(tokenizer, prompt, generated) == " a time"


def _shown(tokenizer: Any, prompt: list[int], generated: list[int]) -> list[str]:
    """Returns what each token makes certain."""
    stream, last = wording.TextStream(tokenizer, prompt), len(generated)
    return [stream.update(generated[:n], is_last=n == last) for n in range(1, last + 1)]


def test_characters_are_held_back_until_they_are_complete(
    tokenizer: Any, fallback_tokenizer: Any
) -> None:
    generated = _bytes(tokenizer, "a€b")
    assert _shown(tokenizer, [_BOS], generated) == ["a", "", "", "€", "b"]
    # Some decode a run of bytes as a whole, with those that the prompt began.
    run = [*(3 + byte for byte in "éé".encode()), 260]
    assert _shown(fallback_tokenizer, [1], run) == ["", "", "", "", "ééa"]
    run = [3 + byte for byte in "😀".encode()]
    prompt, generated = [1, 260, *run[:2]], [*run[2:], 260]
    assert wording.continuation(fallback_tokenizer, prompt, generated) == "😀a"
    assert _shown(fallback_tokenizer, prompt, generated) == ["", "", "😀a"]


_DECODERS = {
    "bytes": decoders.ByteLevel(),
    "metaspace": decoders.Metaspace(),
    "pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(suffix="</w>"),
    "strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]),
}
_SYMBOLS = ("<s>", "a", "▁", "▁a", "##b", "a</w>", ".", "▁.", "â", "Ĥ", "¬", "ÿ", "Ġ")


@pytest.mark.parametrize("kind", [*_DECODERS, "tokenizer", "fallback_tokenizer"])
@settings(deadline=None, max_examples=150)
@given(data=st.data(), step=st.integers(1, 3))
def test_updates_add_up_to_the_text_whatever_a_decoder_does_between_tokens(
    request: pytest.FixtureRequest, kind: str, data: Any, step: int
) -> None:
    if kind in _DECODERS:
        vocabulary = {symbol: id_ for id_, symbol in enumerate(_SYMBOLS)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
        backend.decoder = _DECODERS[kind]
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend)
    else:
        tokenizer = request.getfixturevalue(kind)
    ids = st.integers(0, len(tokenizer) - 1)
    if kind == "fallback_tokenizer":  # Bytes of characters, and what parts them.
        ids = st.integers(259, 263) | st.sampled_from([3 + x for x in "😀é".encode()])
    prompt = data.draw(st.lists(ids, max_size=3))
    generated = data.draw(st.lists(ids, max_size=12))
    stream = wording.TextStream(tokenizer, prompt)
    counts = [*range(0, len(generated), step), len(generated)]
    shown = [
        stream.update(generated[:count], is_last=place == len(counts) - 1)
        for place, count in enumerate(counts)
    ]
    assert "".join(shown) == wording.continuation(tokenizer, prompt, generated)


@pytest.mark.parametrize("kind", ["tokenizer", "fallback_tokenizer"])
def test_updates_decode_the_last_tokens_alone(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer, decoded = request.getfixturevalue(kind), []
    decode = type(tokenizer).decode

    def noted(self: Any, ids: list[int], **settings: Any) -> str:
        decoded.append(len(ids))
        return decode(self, ids, **settings)

    generated = [id_ for id_ in (260, 261, 262) for _ in range(30)]
    stream = wording.TextStream(tokenizer, [1, *generated])
    stream.update([], is_last=False)
    stream.update(generated[:1], is_last=False)
    monkeypatch.setattr(type(tokenizer), "decode", noted)
    for count in range(2, len(generated)):
        stream.update(generated[:count], is_last=False)
    assert max(decoded) <= 3


@pytest.mark.parametrize("num_generated", range(1, 4))
def test_a_character_that_the_prompt_began_shows_once(
    tokenizer: Any, num_generated: int
) -> None:
    ids = _bytes(tokenizer, "a\ufffd😀b")
    prompt, generated = ids[: -1 - num_generated], ids[-1 - num_generated :]
    assert wording.continuation(tokenizer, prompt, generated) == "😀b"
    assert wording.continuation(tokenizer, prompt, generated[-1:]) == "b"
    assert wording.continuation(tokenizer, prompt, []) == ""
    expected = [""] * (num_generated - 1) + ["😀", "b"]
    assert _shown(tokenizer, prompt, generated) == expected
