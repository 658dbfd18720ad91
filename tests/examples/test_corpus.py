"""The standard library as text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.embedded_pair import corpus
from tests.helpers import refused

MODULE = '''"""A module."""

import os


def first(x):
    return [
        x,
    ]


class Second:
    def method(self):
        pass


@decorated
def third():
    return "é"
'''


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return corpus.train_tokenizer([MODULE] * 4, vocab_size=300)


def test_held_out_modules_and_their_tests_are_never_trained_on() -> None:
    kept, held_out = corpus.library_files()
    names = {path.stem for path in kept}
    for module in corpus.HELD_OUT:
        last = module.rsplit("/", 1)[-1]
        if last not in ("decoder", "encoder"):  # Other packages have these too.
            assert f"test_{last}" not in names
    assert {"textwrap", "heapq", "statistics"} <= {path.stem for path in held_out}
    assert not {"textwrap", "heapq", "statistics"} & names
    assert not set(kept) & set(held_out)
    tests = corpus.held_out_tests()
    assert {"test_textwrap", "test_heapq"} <= {path.stem for path in tests}
    assert not set(tests) & {*kept, *held_out}
    assert len(kept) > 200


def test_a_folder_without_the_library_is_refused(tmp_path: Path) -> None:
    refused(
        lambda: corpus.library_files(tmp_path), "no folder of Python's standard library"
    )


@pytest.mark.parametrize("length", [1, 40, 10_000])
def test_pieces_together_are_the_text(length: int) -> None:
    assert "".join(corpus.pieces(MODULE, length)) == MODULE


def test_pieces_begin_with_statements() -> None:
    starts = [piece.splitlines()[0] for piece in corpus.pieces(MODULE, 40)]
    assert starts == [
        '"""A module."""',
        "class Second:",
        "@decorated",
    ]


def test_the_tokenizer_keeps_every_byte(tokenizer: Any) -> None:
    ids = tokenizer.encode(MODULE).ids
    assert ids[0] == 0 and len(ids) < len(MODULE)
    assert tokenizer.decode(ids) == MODULE


def test_rows_begin_with_the_mark_and_a_line(tokenizer: Any) -> None:
    stream = corpus.token_stream(tokenizer, [MODULE] * 20)
    rows = stream.rows(16, 4, step=3, seed=0)
    assert rows.shape == (4, 17) and rows.dtype == np.int32
    assert (rows[:, 0] == 0).all()
    lines = MODULE.splitlines(keepends=True)
    for row in rows:
        text = tokenizer.decode(row.tolist())
        assert any(line.startswith(text[: len(line)]) for line in lines)


def test_the_rows_of_a_step_depend_on_step_and_seed_alone(tokenizer: Any) -> None:
    stream = corpus.token_stream(tokenizer, [MODULE] * 20)
    first = stream.rows(16, 4, step=2, seed=0)
    np.testing.assert_array_equal(first, stream.rows(16, 4, step=2, seed=0))
    assert (first != stream.rows(16, 4, step=3, seed=0)).any()
    assert (first != stream.rows(16, 4, step=2, seed=1)).any()
