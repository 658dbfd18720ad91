import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle_jax.generation import text
from eagle_jax.generation.tokenizer import load_tokenizer
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
    ids = text.encode(tokenizer, "the end", chat=False)
    assert ids[0] == _BOS
    assert len(ids) < 1 + len("the end"), "merges are used"
    assert tokenizer.decode(ids[1:]) == "the end"


def test_an_empty_prompt_is_what_the_tokenizer_adds(tokenizer: Any) -> None:
    assert text.encode(tokenizer, "", chat=False) == [_BOS]


def test_a_prompt_without_any_token_is_refused(silent_tokenizer: Any) -> None:
    assert text.encode(silent_tokenizer, "a", chat=False)
    refused(
        lambda: text.encode(silent_tokenizer, "", chat=False),
        "prompt '' has no token",
        "give a prompt",
    )


def test_chat_without_a_template_is_refused(tokenizer: Any) -> None:
    refused(
        lambda: text.encode(tokenizer, "Hello", chat=True),
        "`chat` needs a chat template",
    )


def test_chat_wraps_the_prompt_and_begins_the_text_once(silent_tokenizer: Any) -> None:
    silent_tokenizer.chat_template = _TEMPLATE
    ids = text.encode(silent_tokenizer, "Hello", chat=True)
    assert ids[0] == _BOS
    assert _BOS not in ids[1:]
    assert silent_tokenizer.decode(ids[1:]) == "[user]Hello[assistant]"


def test_continuations_leave_out_the_prompt_and_special_tokens(tokenizer: Any) -> None:
    prompt = text.encode(tokenizer, "Once", chat=False)
    generated = [*_bytes(tokenizer, " upon"), _EOS]
    assert text.continuation(tokenizer, prompt, generated) == " upon"
    assert text.continuation(tokenizer, prompt, []) == ""


def test_continuations_keep_the_space_that_sentencepiece_hides(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "models" / "stories260K", 512)
    prompt = text.encode(tokenizer, "Once upon", chat=False)
    whole = text.encode(tokenizer, "Once upon a time", chat=False)
    assert whole[: len(prompt)] == prompt
    generated = whole[len(prompt) :]
    assert text.continuation(tokenizer, prompt, generated) == " a time"


def test_characters_are_held_back_until_they_are_complete(tokenizer: Any) -> None:
    generated = _bytes(tokenizer, "a€b")
    assert len(generated) == 5
    stream = text.TextStream(tokenizer, [_BOS])
    shown = [
        stream.update(generated[:count], is_last=count == 5) for count in range(1, 6)
    ]
    assert shown == ["a", "", "", "€", "b"]


def test_the_end_of_a_text_is_never_held_back(tokenizer: Any) -> None:
    generated = _bytes(tokenizer, "a€")[:-1]
    stream = text.TextStream(tokenizer, [_BOS])
    assert stream.update(generated[:2], is_last=False) == "a"
    assert stream.update(generated, is_last=True) == "\ufffd"


def test_an_update_without_new_tokens_shows_nothing(tokenizer: Any) -> None:
    stream = text.TextStream(tokenizer, [_BOS])
    assert stream.update([], is_last=False) == ""
    assert stream.update(_bytes(tokenizer, "ab"), is_last=False) == "ab"
    assert stream.update(_bytes(tokenizer, "ab"), is_last=True) == ""


@settings(deadline=None, max_examples=200)
@given(
    generated=st.lists(st.integers(0, _EOS), max_size=12),
    cuts=st.sets(st.integers(0, 12)),
)
def test_updates_add_up_to_the_text_whatever_bytes_come(
    tokenizer: Any, generated: list[int], cuts: set[int]
) -> None:
    prompt = text.encode(tokenizer, "Once", chat=False)
    stream = text.TextStream(tokenizer, prompt)
    counts = [*sorted(cut for cut in cuts if cut < len(generated)), len(generated)]
    shown = [
        stream.update(generated[:count], is_last=count == len(generated))
        for count in counts
    ]
    assert "".join(shown) == text.continuation(tokenizer, prompt, generated)


@settings(deadline=None, max_examples=200)
@given(
    generated=st.lists(
        st.integers(259, 263) | st.sampled_from([3 + byte for byte in "😀é".encode()])
    )
)
def test_updates_add_up_where_bytes_are_decoded_in_runs(
    fallback_tokenizer: Any, generated: list[int]
) -> None:
    stream = text.TextStream(fallback_tokenizer, [1])
    shown = [
        stream.update(generated[:count], is_last=count == len(generated))
        for count in range(len(generated) + 1)
    ]
    whole = text.continuation(fallback_tokenizer, [1], generated)
    assert "".join(shown) == whole


_DECODERS = {
    "bytes": decoders.ByteLevel(),
    "metaspace": decoders.Metaspace(),
    "pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(suffix="</w>"),
    "strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]),
}


@pytest.mark.parametrize("kind", _DECODERS)
@settings(deadline=None, max_examples=200)
@given(
    prompt=st.lists(st.integers(0, 12), max_size=3),
    generated=st.lists(st.integers(0, 12), max_size=12),
    step=st.integers(1, 3),
)
def test_updates_add_up_whatever_a_decoder_does_between_tokens(
    kind: str, prompt: list[int], generated: list[int], step: int
) -> None:
    symbols = [
        "<s>",
        "a",
        "▁",
        "▁a",
        "##b",
        "a</w>",
        ".",
        "▁.",
        "â",
        "Ĥ",
        "¬",
        "ÿ",
        "Ġ",
    ]
    vocabulary = {symbol: id_ for id_, symbol in enumerate(symbols)}
    model = models.WordLevel(vocabulary, unk_token="<s>")
    backend = Tokenizer(model)
    backend.decoder = _DECODERS[kind]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    stream = text.TextStream(tokenizer, prompt)
    counts = [*range(0, len(generated), step), len(generated)]
    shown = [
        stream.update(generated[:count], is_last=place == len(counts) - 1)
        for place, count in enumerate(counts)
    ]
    assert "".join(shown) == text.continuation(tokenizer, prompt, generated)


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
    stream = text.TextStream(tokenizer, [1, *generated])
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
    assert text.continuation(tokenizer, prompt, generated) == "😀b"
    assert text.continuation(tokenizer, prompt, generated[-1:]) == "b"
    assert text.continuation(tokenizer, prompt, []) == ""
    stream = text.TextStream(tokenizer, prompt)
    shown = [
        stream.update(generated[:n], is_last=False) for n in range(num_generated + 2)
    ]
    assert shown == [""] * num_generated + ["😀", "b"]


def test_a_run_of_bytes_that_the_prompt_began_shows_once(
    fallback_tokenizer: Any,
) -> None:
    bytes_ = [3 + byte for byte in "😀".encode()]
    prompt, generated = [1, 260, *bytes_[:2]], [*bytes_[2:], 260]
    assert text.continuation(fallback_tokenizer, prompt, generated) == "😀a"
    stream = text.TextStream(fallback_tokenizer, prompt)
    shown = [stream.update(generated[:n], is_last=n == 3) for n in range(4)]
    assert shown == ["", "", "", "😀a"]


def test_a_run_of_bytes_shows_when_it_is_over(fallback_tokenizer: Any) -> None:
    generated = [*(3 + byte for byte in "éé".encode()), 260]
    stream = text.TextStream(fallback_tokenizer, [1])
    shown = [stream.update(generated[:n], is_last=False) for n in range(1, 6)]
    assert shown == ["", "", "", "", "ééa"]


@pytest.mark.parametrize("written", ["a€b", "😀 Zoë", "naïve — “so”", "日本語"])
def test_updates_of_any_rhythm_add_up_to_what_was_written(
    tokenizer: Any, written: str
) -> None:
    generated = _bytes(tokenizer, written)
    inner = range(1, len(generated))
    for cuts in itertools.combinations(inner, 2):
        stream = text.TextStream(tokenizer, [_BOS])
        shown = [stream.update(generated[:cut], is_last=False) for cut in cuts]
        assert "\ufffd" not in "".join(shown)
        shown.append(stream.update(generated, is_last=True))
        assert "".join(shown) == written
