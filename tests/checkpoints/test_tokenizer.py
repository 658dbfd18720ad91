"""What is done with the tokenizer of a checkpoint, and what never."""

import json
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest

from eagle_jax.generation.tokenizer import load_tokenizer
from tests.helpers import refused


@pytest.fixture
def folder(tiny_pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))


def test_code_of_a_checkpoint_is_not_run_even_after_a_yes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = folder / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    settings = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own"] * 2},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").rename(folder / "vocab.own")
    answers = StringIO("y\ny\ny\n")
    monkeypatch.setattr(sys, "stdin", answers)
    refused(lambda: load_tokenizer(folder, 300), "no usable tokenizer", "custom code")
    assert not ran.exists()
    assert answers.tell() == 0, "nobody was asked"


def test_a_sentencepiece_file_alone_gives_the_same_ids(
    shared: Path, tmp_path: Path
) -> None:
    known = shared / "models" / "stories260K"
    for path in known.iterdir():
        if path.name != "tokenizer.json":
            shutil.copyfile(path, tmp_path / path.name)
    fast, slow = load_tokenizer(known, 512), load_tokenizer(tmp_path, 512)
    openings = json.loads((shared / "data" / "story_openings.json").read_text())
    for text in [*openings, "", "  é\n\t日本 <s> x</s>", "a" * 100]:
        assert slow(text).input_ids == fast(text).input_ids
        ids = fast(text).input_ids
        assert slow.decode(ids) == fast.decode(ids)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": "1.0", "model": 3}', "{" * 9999]
)
def test_a_broken_tokenizer_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    refused(lambda: load_tokenizer(folder, 300), "no usable tokenizer")


def test_a_panic_of_the_tokenizers_own_code_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it."""

    from transformers import PreTrainedTokenizerFast

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", panic)
    refused(lambda: load_tokenizer(folder, 300), "index out of bounds")


def test_an_id_beyond_the_embedding_is_refused_however_few_there_are(
    folder: Path,
) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["h"] = 100_000
    path.write_text(json.dumps(content))
    refused(lambda: load_tokenizer(folder, 300), "ids up to 100000", "300 rows")
