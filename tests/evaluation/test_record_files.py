"""Files of records: gone on with after a kill, and never mixed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.errors import InputError
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.record_files import RecordFile, check_records
from eagle_jax.evaluation.records import Record, Turn

RUN: dict[str, Any] = {
    "method": "eagle2",
    "label": "eagle2",
    "temperature": 0.0,
    "batch_size": 1,
    "device": "cpu",
    "versions": {"jax": "1"},
}
QUESTIONS = [
    Question(question_id=number, category="a", turns=(f"turn {number}",), number=number)
    for number in range(4)
]


def turn(text: str = "é\u2028") -> Turn:
    return Turn(
        text=text,
        token_ids=[5, 6, 7],
        prompt_tokens=9,
        wall_time=0.5,
        decode_time=0.25,
        accept_lengths=[2, 1],
        stop_reason="max_tokens",
    )


def record(number: int, *turns: Turn) -> Record:
    question = QUESTIONS[number]
    return Record(
        question_id=question.question_id,
        category=question.category,
        question=question.fingerprint,
        number=question.number,
        turns=turns or (turn(), turn()),
        nodes=None,
        model_id="eagle2-t0-b1",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the records of two questions."""
    path = tmp_path / "eagle2-t0-b1.jsonl"
    with RecordFile(path, RUN, QUESTIONS) as file:
        for number in (2, 0):
            file.add(record(number))
    return path


def ids(path: Path) -> list[int]:
    head, *lines = path.read_text(encoding="utf-8").split("\n")
    assert json.loads(head) == {"run": RUN}
    assert lines.pop() == ""
    return [json.loads(line)["question_id"] for line in lines]


def refused(path: Path, run: dict[str, Any] = RUN) -> str:
    """How a file is refused, which must stay as it is."""
    before = path.read_bytes()
    with pytest.raises(InputError) as early:
        check_records(path, run, QUESTIONS)
    with pytest.raises(InputError) as error:
        RecordFile(path, run, QUESTIONS)
    assert path.read_bytes() == before
    assert str(error.value) == str(early.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_record_has_the_layout_of_spec_bench() -> None:
    made = record(2).to_json()
    assert made["question_id"] == 2
    assert (made["category"], made["model_id"]) == ("a", "eagle2-t0-b1")
    assert len(made["answer_id"]) == 22
    assert made["answer_id"] != record(2).answer_id
    assert made["choices"] == [
        {
            "index": 0,
            "turns": ["é\u2028", "é\u2028"],
            "new_tokens": [3, 3],
            "wall_time": [0.5, 0.5],
            "decode_time": [0.25, 0.25],
            "decoding_steps": [2, 2],
            "accept_lengths": [2, 1, 2, 1],
            "prompt_tokens": [9, 9],
            "token_ids": [[5, 6, 7], [5, 6, 7]],
            "stop_reasons": ["max_tokens", "max_tokens"],
        }
    ]
    assert made["nodes"] is None


def test_a_record_is_whole_on_the_disk_at_once(path: Path) -> None:
    with RecordFile(path, RUN, QUESTIONS) as file:
        file.add(record(1))
        assert ids(path) == [2, 0, 1]
        assert [old.question_id for old in file.records] == [2, 0, 1]


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(path: Path) -> None:
    whole = path.read_bytes()
    line = json.dumps(record(3).to_json()).encode()
    for length in range(1, len(line) + 1, 7):
        path.write_bytes(whole + line[:length])
        check_records(path, RUN, QUESTIONS)
        with RecordFile(path, RUN, QUESTIONS) as file:
            assert [old.question_id for old in file.records] == [2, 0]
            file.add(record(1))
        assert ids(path) == [2, 0, 1]


def test_a_torn_line_of_settings_is_written_again(path: Path) -> None:
    whole = path.read_bytes()
    for length in (0, 1, 30, whole.index(b"\n")):
        path.write_bytes(whole[:length])
        check_records(path, RUN, QUESTIONS)
        with RecordFile(path, RUN, QUESTIONS) as file:
            file.add(record(1))
        assert ids(path) == [1]


@pytest.mark.parametrize("change", [{"temperature": 1.0}, {"depth": 6}, {"method": 1}])
def test_records_of_other_settings_are_refused(path: Path, change: Any) -> None:
    path.write_bytes(path.read_bytes() + b'{"question_id": 3')  # A torn line stays.
    message = refused(path, RUN | change)
    assert message == f"{path} has other settings: choose another `output`"


@pytest.mark.parametrize("content", ["a poem", "[1]\n", '{"question_id": 1}\n', "\n"])
def test_a_file_of_something_else_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    assert "has other settings" in refused(path)


def test_a_line_that_is_no_record_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"{}\n")
    assert f"{path}:4: `category` = None must be str" in refused(path)


@pytest.mark.parametrize("change", [{"turns": ("other",)}, {"number": 9}])
def test_answers_to_other_questions_are_refused(path: Path, change: Any) -> None:
    """In another place, too: its seed would be another one."""
    other = [dataclasses.replace(QUESTIONS[0], **change)]
    with pytest.raises(InputError, match="answers another question 0: choose another"):
        RecordFile(path, RUN, other)


def test_records_of_questions_not_asked_stay(path: Path) -> None:
    with RecordFile(path, RUN, QUESTIONS[:1]) as file:
        assert len(file.records) == 2


def test_two_processes_do_not_write_one_file(path: Path) -> None:
    with (
        RecordFile(path, RUN, QUESTIONS),
        pytest.raises(InputError, match="is being written by another process"),
    ):
        RecordFile(path, RUN, QUESTIONS)
    RecordFile(path, RUN, QUESTIONS).__exit__(None, None, None)


def test_a_folder_in_the_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        check_records(tmp_path, RUN, QUESTIONS)
    with pytest.raises(InputError, match="cannot write"):
        RecordFile(tmp_path, RUN, QUESTIONS)


def test_half_a_character_does_not_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    with RecordFile(path, RUN, QUESTIONS) as file:
        file.add(record(0, turn("\ud800")))
    assert ids(path) == [0]
