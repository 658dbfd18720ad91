import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.cli.files import (
    check_folder,
    check_writable,
    expand_home,
    read_prompts,
)
from tests.helpers import refused


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_txt_file_holds_a_prompt_per_line(tmp_path: Path) -> None:
    path = _file(tmp_path, "prompts.txt", "One day,\n\n  Zoë \r\n \nlast")
    assert read_prompts(path) == ["One day,", "  Zoë ", "last"]


def test_only_newlines_part_the_prompts_of_a_txt_file(tmp_path: Path) -> None:
    prompts = ["one\ftwo\u2028three\u2029", "\x0bfour\x1c\x85"]
    path = _file(tmp_path, "prompts.txt", "\n".join(prompts))
    assert read_prompts(path) == prompts


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
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path = _file(tmp_path, "questions.jsonl", "\n\n".join(lines) + "\n")
    assert read_prompts(path) == ["a", "b", "c", "d\u2028e"]


def test_prompts_of_the_question_files_are_read(shared: Path) -> None:
    files = sorted(shared.glob("data/**/*.jsonl"))
    assert files
    for path in files:
        assert all(read_prompts(path))


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("empty.txt", "\n  \n", "holds no prompt"),
        ("empty.json", "[]", "holds no prompt"),
        ("empty.jsonl", "\n", "holds no prompt"),
        ("broken.json", '["a",', "not valid JSON"),
        ("object.json", '{"prompt": "a"}', "list of strings"),
        ("numbers.json", '["a", 3]', "prompt 2 is 3"),
        ("records.json", '[{"prompt": "a"}]', "prompt 1 is"),
        ("broken.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not valid"),
        ("other.jsonl", '{"question": "a"}', "need `prompt` or `turns`"),
        ("turns.jsonl", '{"turns": [{"content": "a"}]}', "prompt 1 is"),
        ("null.jsonl", '{"prompt": null}', "prompt 1 is None"),
        ("prompts.csv", "a\n", "must end in .txt, .json or .jsonl"),
        ("prompts", "a\n", "must end in .txt, .json or .jsonl"),
    ],
)
def test_what_holds_no_prompts_is_refused(
    tmp_path: Path, name: str, text: str, named: str
) -> None:
    path = _file(tmp_path, name, text)
    refused(lambda: read_prompts(path), named, str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"caf\xe9\n")
    refused(lambda: read_prompts(path), "cannot read the prompts", "prompts.txt")


def test_a_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    refused(
        lambda: read_prompts(tmp_path / "nowhere.txt"), "nowhere.txt:", "No such file"
    )


def test_a_writable_path_is_left_as_it_is(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    old = _file(tmp_path, "old.json", "old")
    check_writable(old)
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    refused(lambda: check_writable(tmp_path), "it is a folder; give a file name")


def test_an_output_below_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "out.json"
    refused(lambda: check_writable(path), "No such file or directory", str(path))
    assert not list(tmp_path.iterdir())


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    file = _file(tmp_path, "file", "")
    refused(lambda: check_writable(file / "out.json"), "Not a directory")


def test_a_device_that_is_full_is_refused() -> None:
    refused(lambda: check_writable(Path("/dev/full")), "/dev/full", "No space left")


def test_a_device_that_takes_everything_is_not_refused() -> None:
    check_writable(Path("/dev/null"))


def test_a_pipe_is_left_to_who_reads_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)  # Opening it would wait for a reader.


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may become longer than nothing."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_refused_and_an_old_file_kept(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    old = _file(tmp_path, "old.json", "old")
    request.getfixturevalue("full_disk")
    refused(lambda: check_writable(old), str(old), "File too large")
    refused(lambda: check_folder(tmp_path), str(tmp_path), "File too large")
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_an_output_folder_is_not_made_yet(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deeper")
    check_folder(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/deeper"])
def test_an_output_folder_below_a_file_is_refused(tmp_path: Path, name: str) -> None:
    _file(tmp_path, "file", "")
    path = tmp_path / name
    refused(lambda: check_folder(path), f"cannot write to {path}", "Not a directory")


def test_a_home_that_nobody_has_is_refused() -> None:
    path = Path("~nobody-of-that-name/out")
    refused(lambda: expand_home(path), str(path), "home")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_locked_folder_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(lambda: check_writable(locked / "out.json"), "Permission denied")


def test_what_a_killed_process_left_of_an_output_is_removed(tmp_path: Path) -> None:
    path = _file(tmp_path, "out.json", "old")
    (tmp_path / ".out.json.unfinished").write_text("half")
    check_writable(path)
    assert list(tmp_path.iterdir()) == [path]
