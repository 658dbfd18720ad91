"""Retrieval from a text file: what is drafted, and what is no such file."""

from pathlib import Path

from eagle_jax.drafting.rest import RestConfig, make_rest
from tests.drafting.test_lookup import propose
from tests.helpers import refused


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_what_followed_in_the_file_is_drafted(tmp_path: Path) -> None:
    """The longest match, though the text itself has none."""
    file = tmp_path / "store.txt"
    file.write_text("3 8 8 8 2 3 4 5 6 7", encoding="utf-8-sig")
    settings = RestConfig(datastore=str(file), num_nodes=4, depth=3, width=1)
    tree = propose([9, 2, 3], make_rest(settings, encode))
    assert tree.tokens.tolist() == [3, 4, 5, 6]
    assert tree.is_node.all()


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file, binary = tmp_path / "missing", tmp_path / "store.bin"
    binary.write_bytes(b"\xff")
    for path, named in ((None, "a text file"), (file, "No such"), (binary, "in UTF-8")):
        settings = RestConfig(datastore=path and str(path))
        refused(lambda settings=settings: make_rest(settings, encode), named)
