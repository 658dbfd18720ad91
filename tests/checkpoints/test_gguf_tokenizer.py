"""The tokenizer of a GGUF file is the one that transformers makes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.checkpoints import resolve
from eagle_jax.constraints.grammar import byte_alphabet
from eagle_jax.engine.wording import load_tokenizer
from tests.checkpoints.gguf_files import write_gguf

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_PAIRS = ["th", "he", "the", "at", "ea"]
_TEXTS = [
    *("the heat", "  two", "1 2 3", " na\u00efve \U0001f600", "a\n\tb", ""),
    *("<s>the", "heat</s>", "\u4e2d", "The HEAT, theatre."),
]


def _kinds() -> dict[str, dict[str, Any]]:
    """What files say of a tokenizer of SentencePiece, and of bytes in pairs."""
    ends = ["<s>", "</s>"]
    letters = ["\u2581", *"abehnot123", *_PAIRS, "\u2581the"]
    pieces = ["<unk>", *ends, *(f"<0x{n:02X}>" for n in range(256)), *letters]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(letters)]
    symbols = [*ends, *byte_alphabet(), *_PAIRS]
    merges = ["t h", "h e", "th e", "a t", "e a"]
    return {
        "llama": {
            "tokens": pieces,
            "token_type": types,
            "scores": [-float(n) for n in range(len(pieces))],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        },
        "gpt2": {
            "pre": "qwen2",
            "tokens": symbols,
            "token_type": [_CONTROL] * 2 + [_NORMAL] * (len(symbols) - 2),
            "merges": merges,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache, which is made anew for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _written(folder: Path, kind: str, **more: Any) -> Path:
    """A file whose model is too small to be run, and has this tokenizer."""
    said = _kinds()[kind] | {"model": kind} | more
    fields = {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    sizes = ("context_length", "embedding_length", "feed_forward_length")
    fields |= {f".{name}": 32 for name in sizes}
    fields |= {".block_count": 1, ".attention.layer_norm_rms_epsilon": 1e-5}
    fields |= {".attention.head_count": 2, ".attention.head_count_kv": 2}
    fields |= {".rope.freq_base": 1e4, "tokenizer.chat_template": "{{ messages }}"}
    table = np.ones((len(said["tokens"]), 32), np.float32)
    tensors = {"model.embed_tokens.weight": table}
    fields["general.name"] = "a model"
    return write_gguf(folder / "model.gguf", tensors, fields)


def _tokenizer(path: Path) -> Any:
    return load_tokenizer(resolve(str(path)), 1000)


@pytest.mark.parametrize(
    ("kind", "more", "starts"),
    [
        ("llama", {}, True),
        ("llama", {"add_bos_token": False}, False),
        ("gpt2", {}, False),
        ("gpt2", {"add_bos_token": True}, True),
    ],
)
def test_texts_begin_with_the_start_token_where_llama_cpp_adds_one(
    kind: str, more: dict[str, Any], starts: bool, tmp_path: Path
) -> None:
    tokenizer = _tokenizer(_written(tmp_path, kind, **more))
    ids = tokenizer("the heat").input_ids
    assert (ids[0] == tokenizer.bos_token_id) is starts
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "the heat"
    assert tokenizer.chat_template == "{{ messages }}"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_ids_are_those_of_transformers_reading_of_the_file(
    kind: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    path = _written(tmp_path, kind)
    judge: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = _tokenizer(path)
    for text in _TEXTS:
        assert ours(text).input_ids == judge(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == judge.decode(judge(text).input_ids)
