"""Which tokens a draft model chooses among: files, defaults, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.drafting import DraftModel
from eagle_jax.generation.pairs import open_pair
from eagle_jax.generation.vocabulary import read_vocabulary
from eagle_jax.heads.eagle.draft import EagleHead
from tests import tiny
from tests.helpers import refused, settings_of

MODEL = EagleHead(config=tiny.head_config(vocab_size=8))
FILE = {"vocab_size": 8, "ids": [7, 2, 5, 0]}


class Letters:
    """A tokenizer, as far as a draft vocabulary knows one."""

    all_special_ids = (0, 9)  # The second is beyond the target's tokens.

    def __call__(self, text: str, *, verbose: bool) -> SimpleNamespace:
        del verbose
        return SimpleNamespace(input_ids=["abcdefgh".index(one) for one in text])


def read(
    folder: Path | None,
    given: str | int | None = None,
    model: DraftModel = MODEL,
    stops: tuple[int, ...] = (2, 7),
) -> tuple[int, ...] | None:
    known: Any = {"vocab_size": 8, "stop_tokens": stops, "read_tokenizer": Letters}
    return read_vocabulary(given, model, folder, **known)


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
    other.write_text(json.dumps(FILE | {"ids": [7, 2, 0, 1, 3, 4, 5, 6]}))
    assert read(folder, str(other)) is None, "all tokens need no smaller head"


@pytest.mark.parametrize(
    ("change", "given", "named"),
    [
        ({"ids": [7, 2, 8]}, None, "different token ids of 0 to 7"),
        ({"ids": [7, 2, 5, 2]}, None, "different token ids"),
        ({}, 5, "`draft_vocabulary` = 5 must be 1 to 4"),
        ({}, "0", "`draft_vocabulary` = 0 must be 1 to 4"),
        ({"vocab_size": 9}, None, 'must hold "vocab_size": 8'),
        ({"ids": []}, None, "token ids"),
        ({"ids": [7, 2, 1.5]}, None, "token ids"),
        ({"ids": {"7": 2}}, None, "token ids"),
        ({}, "nowhere.json", "cannot read nowhere.json"),
        ({}, "-5", "cannot read -5"),
        ({}, "4@nowhere", "cannot read nowhere"),
        (None, 3, "there is no |draft_vocabulary.json|N@FILE"),
    ],
)
def test_what_no_draft_can_choose_among_is_refused(
    folder: Path, change: dict[str, Any] | None, given: str | int | None, named: str
) -> None:
    path = folder / "draft_vocabulary.json"
    path.unlink() if change is None else path.write_text(json.dumps(FILE | change))
    refused(lambda: read(folder, given), *named.split("|"))
    refused(lambda: read(None, 3), "there is no draft_vocabulary.json", "N@FILE")


def test_heads_with_output_heads_of_their_own_take_none(folder: Path) -> None:
    heads = tiny.medusa(8)
    assert read(folder, None, heads) is read(folder, "none", heads) is None
    refused(lambda: read(folder, 3, heads), "only EAGLE-1/2 heads")


def test_a_pair_is_loaded_with_as_many_columns(tiny_pair: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_pair / "head", tmp_path / "draft"))
    ids = {"vocab_size": 300, "ids": [299, *range(40)]}
    (draft / "draft_vocabulary.json").write_text(json.dumps(ids))
    text = tmp_path / "text.txt"
    text.write_text("the heart of the matter")
    tree = TreeConfig(num_nodes=4, depth=2, width=2)
    for given, size in ((None, 41), (f"9@{text}", 9), ("none", 300)):
        settings = settings_of(tree, draft_vocabulary=given)
        loaded = open_pair(str(tiny_pair / "target"), str(draft), settings).load()
        assert loaded.params.drafter.output_head.shape[1] == size
        assert loaded.params.target.output_head.shape[1] == 300


def test_of_a_text_special_tokens_come_first_then_those_that_it_has_most(
    tmp_path: Path,
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ddbddebebddbed")
    for size, expected in ((2, (0, 6)), (5, (0, 1, 3, 4, 6)), (8, None)):
        given = f"{size}@{path}"
        assert read(None, given, stops=(6,)) == expected
    for size in (0, 1, 9):
        refused(
            lambda s=size: read(None, f"{s}@{path}", stops=(6,)),
            f"`draft_vocabulary` = {size}",
            "2 (special and stop tokens) to 8 (all tokens)",
        )
