"""Which tokens a draft model chooses among, and what is refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.drafting import DraftModel
from eagle_jax.engine.open import open_pair
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.heads.eagle.vocabulary import read_vocabulary
from tests import tiny
from tests.helpers import refused, settings_of

MODEL = EagleHead(config=tiny.head_config(vocab_size=8))


class Letters:
    """A tokenizer, as far as a draft vocabulary knows one."""

    all_special_ids = (0, 9)  # The second is beyond the target's tokens.

    def __call__(self, text: str, *, verbose: bool) -> SimpleNamespace:
        del verbose
        return SimpleNamespace(input_ids=["abcdefgh".index(one) for one in text])


def read(
    given: str | None, model: DraftModel = MODEL, folder: Path | None = None
) -> tuple[int, ...] | None:
    known: Any = {"vocab_size": 8, "stop_tokens": (6,), "read_tokenizer": Letters}
    return read_vocabulary(given, model, folder=folder, **known)


def test_all_tokens_are_drafted_where_no_others_are_asked_for() -> None:
    for model in (MODEL, tiny.medusa(8)):
        assert read(None, model) is read("none", model) is None


@pytest.mark.parametrize("given", ["9", "tokens.json", "-5@a", "@a", "4@nowhere"])
def test_what_names_no_tokens_is_refused(given: str) -> None:
    named = "cannot read nowhere" if given == "4@nowhere" else "must be N@FILE"
    refused(lambda: read(given), named)
    refused(lambda: read(given, tiny.medusa(8)), "only EAGLE-1/2 heads")


def test_a_head_drafts_its_own_tokens_where_no_others_are_asked_for(
    tmp_path: Path,
) -> None:
    own = tmp_path / "vocabulary.json"
    own.write_text("[5, 2, 7]")
    assert read(None, folder=tmp_path) == (2, 5, 7)
    assert read("none", folder=tmp_path) is None
    text = tmp_path / "text.txt"
    text.write_text("abc")
    assert read(f"4@{text}", folder=tmp_path) == (0, 1, 2, 6)
    assert read(None, tiny.medusa(8), folder=tmp_path) is None  # Nor has a model.
    for broken in ("[]", "[8]", "[-1]", '["a"]', "{}", "[true]"):
        own.write_text(broken)
        refused(lambda: read(None, folder=tmp_path), str(own), "token ids below 8")


def test_a_pair_is_loaded_with_as_many_columns(tiny_pair: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the heart of the matter", encoding="utf-8-sig")
    head = Path(shutil.copytree(tiny_pair / "head", tmp_path / "head"))
    (head / "vocabulary.json").write_text("[1, 299, 7, 12, 5]")
    tree = TreeConfig(num_nodes=4, depth=2, width=2)
    for draft, given, size in (
        (tiny_pair / "head", None, 300),
        (tiny_pair / "head", f"9@{text}", 9),
        (head, None, 5),
        (head, "none", 300),
    ):
        names = str(tiny_pair / "target"), str(draft)
        loaded = open_pair(*names, settings_of(tree, draft_vocabulary=given)).load()
        assert loaded.params.drafter.output_head.shape[1] == size
        assert loaded.params.target.output_head.shape[1] == 300


def test_of_a_text_special_tokens_come_first_then_those_that_it_has_most(
    tmp_path: Path,
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ddbddebebddbed")
    for size, expected in ((2, (0, 6)), (5, (0, 1, 3, 4, 6)), (8, None)):
        given = f"{size}@{path}"
        assert read(given) == expected
    for size in (0, 1, 9):
        refused(
            lambda s=size: read(f"{s}@{path}"),
            f"`draft_vocabulary` = {size}",
            "2 (special and stop tokens) to 8 (all tokens)",
        )
