import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.cli.files import (
    check_folder,
    check_writable,
    read_prompts,
    read_settings,
)
from tests.helpers import refused


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_txt_file_holds_a_prompt_per_line(tmp_path: Path) -> None:
    path = _file(tmp_path, "prompts.txt", "One day,\n\n  Zoë \r\n \na\fb\u2028c\x85")
    # Nothing but newlines part prompts.
    assert read_prompts(path) == ["One day,", "  Zoë ", "a\fb\u2028c\x85"]


def test_a_json_file_holds_a_list(tmp_path: Path) -> None:
    prompts = ["One\nday", "", "Zoë"]
    path = _file(tmp_path, "prompts.json", json.dumps(prompts))
    assert read_prompts(path) == prompts


def test_a_jsonl_file_holds_prompts_and_first_turns(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "a", "id": 1},
        {"turns": ["b", "later"]},
        {"prompt": "unused", "turns": ["c"]},
        {"prompt": "d\u2028e", "turns": []},
        # As `regenerate` writes them, after a line of its settings.
        {"run": {"seed": 3}},
        {"messages": [{"role": r, "content": r} for r in ("system", "user", "x")]},
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path = _file(tmp_path, "questions.jsonl", "\n\n".join(lines) + "\n")
    assert read_prompts(path) == ["a", "b", "c", "d\u2028e", "user"]
    assert len(read_settings(path)) == 5


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", "One"), ("a.json", '["One"]'), ("a.jsonl", '{"prompt": "One"}')],
)
def test_a_byte_order_mark_is_no_part_of_a_prompt(
    tmp_path: Path, name: str, text: str
) -> None:
    path = _file(tmp_path, name, "\ufeff" + text)
    assert read_prompts(path) == ["One"]
    assert read_settings(path) == [{}]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("empty.txt", "\n  \n", "holds no prompt"),
        ("empty.json", "[]", "holds no prompt"),
        ("broken.json", '["a",', "not valid JSON"),
        ("object.json", '{"prompt": "a"}', "list of strings"),
        ("numbers.json", '["a", 3]', "prompt 2 is 3"),
        ("broken.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not valid"),
        ("other.jsonl", '{"question": "a"}', "need `prompt` or `turns`"),
        ("turns.jsonl", '{"turns": [{"content": "a"}]}', "prompt 1 is"),
        ("prompts.csv", "a\n", "must end in .txt, .json or .jsonl"),
        ("latin.txt", "caf\udce9", "cannot read the prompts"),
        ("nowhere.txt", None, "No such file"),
    ],
)
def test_what_holds_no_prompts_is_refused(
    tmp_path: Path, name: str, text: str | None, named: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    refused(lambda: read_prompts(path), named, str(path))


def test_a_writable_path_is_left_as_it_is(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    old = _file(tmp_path, "old.json", "old")
    check_writable(old)
    assert old.read_text() == "old"
    # Nor is what a killed process left.
    (tmp_path / ".old.json.unfinished").write_text("half")
    check_writable(old)
    assert list(tmp_path.iterdir()) == [old]
    check_writable(Path("/dev/null"))


@pytest.mark.parametrize(
    ("check", "path", "named"),
    [
        (check_writable, "", "it is a folder; give a file name"),
        (check_writable, "nowhere/out.json", "No such file or directory"),
        (check_writable, "file/out.json", "Not a directory"),
        (check_writable, "/dev/full", "No space left"),
        (check_folder, "file", "Not a directory"),
        (check_folder, "file/deeper", "Not a directory"),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[Path], object],
    path: str,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = _file(tmp_path, "file", "")
    refused(lambda: check(Path(path)), path or ".", named)
    check_folder(tmp_path / "new" / "deeper")  # It is not made yet.
    assert list(tmp_path.iterdir()) == [file]


def test_a_pipe_is_left_to_who_reads_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)  # Opening it would wait for a reader.


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may become longer than nothing, not even that of the tests' output."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_refused_and_an_old_file_kept(tmp_path: Path) -> None:
    old = _file(tmp_path, "old.json", "old")
    with full_disk():
        refused(lambda: check_writable(old), str(old), "File too large")
        refused(lambda: check_folder(tmp_path), str(tmp_path), "File too large")
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]
