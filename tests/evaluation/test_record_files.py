"""Files of records: what they hold, and what a run goes on with."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.evaluation.evaluate import read_records
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import Record
from eagle_jax.logs import JsonLines
from tests.helpers import refused

RUN: dict[str, Any] = {
    "method": "eagle2",
    "label": "eagle2",
    "temperature": 0.0,
    "batch_size": 1,
    "device": "cpu",
    "versions": {"jax": "1"},
}
COLUMNS: dict[str, Any] = {
    "turns": ["é\u2028", "é\u2028"],
    "wall_time": [0.5, 0.5],
    "decode_time": [0.25, 0.25],
    "decoding_steps": [2, 2],
    "accept_lengths": [2, 1, 2, 1],
    "prompt_tokens": [9, 9],
    "token_ids": [[5, 6, 7], [5, 6, 7]],
    "stop_reasons": ["max_tokens", "max_tokens"],
}
QUESTIONS = [
    Question(question_id=number, category="a", turns=(f"turn {number}",), number=number)
    for number in range(4)
]


def record(number: int) -> Record:
    question = QUESTIONS[number]
    return Record(
        question_id=question.question_id,
        category=question.category,
        question=question.fingerprint,
        number=question.number,
        **COLUMNS,
        nodes=None,
        model_id="eagle2-t0-b1",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the records of two questions."""
    path = tmp_path / "eagle2-t0-b1.jsonl"
    with JsonLines(path, RUN) as file:
        for number in (2, 0):
            file.append(record(number).to_json())
    return path


def test_a_record_has_the_layout_of_spec_bench() -> None:
    made = record(2).to_json()
    assert made["question_id"] == 2
    assert (made["category"], made["model_id"]) == ("a", "eagle2-t0-b1")
    assert len(made["answer_id"]) == 22
    assert made["answer_id"] != record(2).answer_id
    assert made["choices"] == [{"index": 0, "new_tokens": [3, 3]} | COLUMNS]
    assert made["nodes"] is None


def test_records_are_read_as_they_were_written(path: Path) -> None:
    for asked in (QUESTIONS, QUESTIONS[:1]):  # Those not asked stay.
        found = read_records(path, RUN, asked)
        assert [one.question_id for one in found] == [2, 0]
        assert vars(found[0]).items() >= COLUMNS.items()
    assert read_records(path.with_name("new.jsonl"), RUN, QUESTIONS) == []


@pytest.mark.parametrize("change", [{"turns": ("other",)}, {"number": 9}])
def test_answers_to_other_questions_are_refused(path: Path, change: Any) -> None:
    """In another place, too: its seed would be another one."""
    other = [dataclasses.replace(QUESTIONS[0], **change)]
    refused(
        lambda: read_records(path, RUN, other), "answers another question 0: choose"
    )


def test_other_settings_and_lines_that_are_no_record_are_refused(path: Path) -> None:
    other = RUN | {"temperature": 1.0}
    refused(
        lambda: read_records(path, other, QUESTIONS),
        f"{path}: temperature was 0.0 and is 1.0 now",
    )
    path.write_bytes(path.read_bytes() + b"{}\n")
    message = f"{path}:4: `question_id` = None must be int or str"
    refused(lambda: read_records(path, RUN, QUESTIONS), message)
