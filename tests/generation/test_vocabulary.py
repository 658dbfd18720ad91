"""Which tokens a draft model chooses among: files, defaults, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_jax.config import DecodingConfig, TreeConfig
from eagle_jax.drafting import DraftModel, EagleHead
from eagle_jax.generation.pairs import PairSource, open_pair
from eagle_jax.generation.vocabulary import most_frequent, read_vocabulary
from tests import tiny
from tests.helpers import refused, settings_of

MODEL = EagleHead(config=tiny.head_config(vocab_size=8))
FILE = {"vocab_size": 8, "ids": [7, 2, 5, 0]}


class Letters:
    """A tokenizer, as far as a draft vocabulary knows one."""

    def __init__(self, letters: str) -> None:
        self.letters = letters

    all_special_ids = (0, 9)  # The second is beyond the target's tokens.

    def __call__(self, text: str, *, verbose: bool) -> SimpleNamespace:
        del verbose
        return SimpleNamespace(input_ids=[self.letters.index(one) for one in text])


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
        ({}, "0", "`draft_vocabulary` = 0 must be a whole number from 1, alone"),
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
    refused(lambda: read(tmp_path, 3), f"there is no {tmp_path}", "N@FILE")
    refused(lambda: read(None, 3), "no folder", "N@FILE")
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
    tiny_pair: Path, tmp_path: Path, method: str
) -> None:
    half = "target" if method == "small-model" else "head"
    draft = Path(shutil.copytree(tiny_pair / half, tmp_path / "draft"))
    ids = {"vocab_size": 300, "ids": [299, *range(40)]}
    (draft / "draft_vocabulary.json").write_text(json.dumps(ids))

    def opened(given: str | int | None) -> PairSource:
        return open_pair(
            str(tiny_pair / "target"),
            str(draft),
            settings_of(
                TreeConfig(num_nodes=4, depth=2, width=2),
                method=method,
                draft_vocabulary=given,
            ),
        )

    text = tmp_path / "text.txt"
    text.write_text("the heart of the matter")
    for given, size in ((None, 41), (9, 9), (f"9@{text}", 9), ("none", 300)):
        loaded = opened(given).load()
        params = loaded.params.drafter
        head = getattr(params, "model", params).output_head
        assert head.shape[1] == size
        assert loaded.params.target.output_head.shape[1] == 300
    refused(lambda: opened(42), "1 to 41")


def test_special_tokens_come_first_then_those_counted_most(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text.txt", Letters("abcdefgh")
    path.write_text("ddbddebebddbed")
    known = [most_frequent(path, size, tokenizer, 8, [6]) for size in (2, 5, 8)]
    assert known == [[6, 0], [6, 0, 3, 1, 4], [6, 0, 3, 1, 4, 2, 5, 7]]
    for size in (0, 1, 9):
        refused(
            lambda s=size: most_frequent(path, s, tokenizer, 8, [6]),
            f"`draft_vocabulary` = {size}",
            "2 (special and stop tokens) to 8 (all tokens)",
        )


def test_a_number_and_a_text_are_the_most_frequent_tokens_of_the_text(
    folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ddbdd")
    given, letters = f"4@{text}", Letters("abcdefgh")
    assert read(folder, given, tokenizer=letters) == (0, 2, 3, 7)
    assert read(None, f"8@{text}", tokenizer=letters) is None
    refused(lambda: read(None, given), "no tokenizer")
    refused(lambda: read(None, "4@nowhere", tokenizer=letters), "cannot read nowhere")
