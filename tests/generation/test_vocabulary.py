"""Which tokens a draft model chooses among: files, defaults, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.config import DecodingConfig, Method, TreeConfig
from eagle_jax.drafting import DraftModel, EagleHead
from eagle_jax.generation.pairs import PairSource, open_pair
from eagle_jax.generation.vocabulary import (
    most_frequent,
    read_vocabulary,
    vocabulary_file,
)
from tests import tiny
from tests.helpers import refused

MODEL = EagleHead(config=tiny.head_config(vocab_size=8))
FILE = {"vocab_size": 8, "ids": [7, 2, 5, 0]}


class Letters:
    """A tokenizer, as far as a draft vocabulary knows one."""

    def __init__(self, letters: str) -> None:
        self.letters = letters

    def get_vocab(self) -> dict[str, int]:
        return {letter: number for number, letter in enumerate(self.letters)}


def read(
    folder: Path | None,
    given: str | int | None = None,
    model: DraftModel = MODEL,
    tokenizer: Letters | None = None,
) -> tuple[int, ...] | None:
    return read_vocabulary(
        given,
        model,
        folder,
        vocab_size=8,
        stop_tokens=(2, 7),
        read_tokenizer=tokenizer and (lambda: tokenizer),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "draft_vocabulary.json").write_text(json.dumps(FILE))
    return tmp_path


def test_a_draft_takes_the_file_in_its_folder_unless_it_is_told_otherwise(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = tmp_path_factory.mktemp("bare")
    other = bare / "other.json"
    other.write_text(json.dumps(FILE | {"ids": [1, 7, 2]}))
    assert read(folder) == (0, 2, 5, 7)
    assert read(folder, "3") == read(folder, 3) == (2, 5, 7)
    assert read(folder, str(other)) == read(None, str(other)) == (1, 2, 7)
    assert read(folder, "none") is read(bare) is read(None) is None


def test_all_tokens_need_no_smaller_head(folder: Path) -> None:
    everything = FILE | {"ids": [7, 2, 0, 1, 3, 4, 5, 6]}
    (folder / "draft_vocabulary.json").write_text(json.dumps(everything))
    assert read(folder) is read(folder, 8) is None


@pytest.mark.parametrize(
    ("change", "given", "named"),
    [
        ({"ids": [7, 2, 8]}, None, "names token 8|0 to 7"),
        ({"ids": [7, 2, -1]}, None, "names token -1|0 to 7"),
        ({"ids": []}, None, "names no token"),
        ({"ids": [7, 2, 5, 2]}, None, "names token 2 twice"),
        ({"ids": [2, 5]}, None, "the 2 tokens|lack stop token 7"),
        ({}, 1, "the 1 tokens|lack stop token 2"),
        ({"vocab_size": 9}, None, "of 9 tokens, and the target has 8"),
        ({}, 5, "`draft_vocabulary` = 5 must be 1 to 4"),
        ({}, "0", "`draft_vocabulary` = 0 must be a whole number from 1, a file"),
        ({"ids": [7, 2, 1.5]}, None, "must hold"),
        ({"ids": {"7": 2}}, None, "must hold"),
        ({"vocab_size": None}, None, "must hold"),
        ({}, "nowhere.json", "cannot read nowhere.json"),
    ],
)
def test_what_no_draft_can_choose_among_is_refused(
    folder: Path, change: dict[str, Any], given: str | int | None, named: str
) -> None:
    (folder / "draft_vocabulary.json").write_text(json.dumps(FILE | change))
    refused(lambda: read(folder, given), *named.split("|"))


def test_a_number_needs_a_file_to_count_in(tmp_path: Path) -> None:
    refused(lambda: read(tmp_path, 3), f"there is no {tmp_path}", "count-tokens")
    refused(lambda: read(None, 3), "no folder", "count-tokens")
    for given in ("-5", "0", ""):
        shown = f"`draft_vocabulary` = {given or repr('')} must be a whole number"
        refused(lambda g=given: read(tmp_path, g), shown, "or none")
    refused(lambda: DecodingConfig(draft_vocabulary=0), "must be at least 1")


def test_heads_with_output_heads_of_their_own_take_none(folder: Path) -> None:
    heads = tiny.medusa(8)
    assert read(folder, None, heads) is read(folder, "none", heads) is None
    refused(lambda: read(folder, 3, heads), "only EAGLE-1/2 heads and small models")


@pytest.mark.parametrize("method", ["eagle2", "small-model"])
def test_a_pair_is_loaded_with_as_many_columns(
    tiny_pair: Path, tmp_path: Path, method: Method
) -> None:
    half = "target" if method == "small-model" else "head"
    draft = Path(shutil.copytree(tiny_pair / half, tmp_path / "draft"))
    ids = {"vocab_size": 300, "ids": [299, *range(40)]}
    (draft / "draft_vocabulary.json").write_text(json.dumps(ids))

    def opened(given: str | int | None) -> PairSource:
        return open_pair(
            str(tiny_pair / "target"),
            str(draft),
            tree=TreeConfig(num_nodes=4, depth=2, width=2),
            dtype="float32",
            method=method,
            draft_vocabulary=given,
        )

    for given, size in ((None, 41), (9, 9), ("none", 300)):
        loaded = opened(given).load()
        params = loaded.params.drafter
        head = getattr(params, "model", params).output_head
        assert head.shape[1] == size
        assert loaded.params.target.output_head.shape[1] == 300
    refused(lambda: opened(42), "1 to 41")


def test_special_tokens_come_first_then_those_counted_most() -> None:
    counts = np.array([0, 4, 0, 9, 4, 1, 0, 0])
    assert most_frequent(counts, [6, 0, 6], 5) == [6, 0, 3, 1, 4]
    assert most_frequent(counts, [], 8) == [3, 1, 4, 5, 0, 2, 6, 7]
    assert most_frequent(counts, [6]) == [6, 3]  # A quarter.
    assert most_frequent(counts, [6, 5, 0]) == [6, 5, 0]
    for size in (0, 1, 9):
        refused(
            lambda s=size: most_frequent(counts, [6, 0], s), f"`size` = {size}", "2 "
        )
    refused(lambda: most_frequent(counts, [8]), "stop token 8", "8 tokens")


def test_what_is_written_is_read(folder: Path) -> None:
    tokenizer = Letters("abcdefgh")
    text = vocabulary_file([7, 2, 3], np.arange(8), ["texts.jsonl"], tokenizer)
    (folder / "draft_vocabulary.json").write_text(text)
    assert read(folder) == read(folder, tokenizer=tokenizer) == (2, 3, 7)
    assert json.loads(text)["covered"] == 12


def test_a_file_of_another_tokenizer_of_the_same_size_is_refused(folder: Path) -> None:
    own, other = Letters("abcdefgh"), Letters("bacdefgh")
    assert read(folder, tokenizer=own) == (0, 2, 5, 7)  # It does not say whose it is.
    text = vocabulary_file([7, 2, 3], np.arange(8), [], other)
    (folder / "draft_vocabulary.json").write_text(text)
    refused(lambda: read(folder, tokenizer=own), "another tokenizer", "count-tokens")
    assert read(folder, tokenizer=other) == (2, 3, 7)
