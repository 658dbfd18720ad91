"""Records of questions: what is written is read, and a run goes on with it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.errors import InputError
from eagle_jax.evaluation.evaluate import read_records
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import Record, speed
from eagle_jax.logs import JsonLines
from tests.evaluation import synthetic
from tests.helpers import refused

QUESTIONS = [
    Question(question_id=number, category="a", turns=(f"turn {number}",), number=number)
    for number in range(4)
]
RUN = synthetic.RUN


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the records of two questions."""
    path = tmp_path / "eagle2-t0-b1.jsonl"
    with JsonLines(path, RUN) as file:
        for number in (2, 0):
            record = synthetic.record(number, category="a")
            own = {"question": QUESTIONS[number].fingerprint}
            file.append(record | own)
    return path


def test_a_line_is_read_back_and_written_again(tmp_path: Path) -> None:
    for path in synthetic.write_evaluation(tmp_path, questions=1).iterdir():
        _, line = path.read_text().splitlines()
        record = Record.from_json(json.loads(line))
        assert json.dumps(record.to_json()) == line


def test_a_record_has_the_layout_of_spec_bench() -> None:
    made = synthetic.record(2, category="a", token_ids=[[5, 6, 7]])
    choice = {
        "index": 0,
        "turns": ["text"],
        "new_tokens": [3],
        "wall_time": [2.0],
        "decoding_steps": [4],
        "accept_lengths": [1, 1, 1, 1],
        "prompt_tokens": [3],
        "token_ids": [[5, 6, 7]],
        "stop_reasons": ["max_tokens"],
    }
    names = ["question_id", "category", "model_id", "answer_id", "tstamp", "question"]
    assert [*made] == ["run", *names, "number", "asked", "choices", "nodes"]
    assert (made["choices"], made["nodes"]) == ([choice], None)


def test_records_are_read_as_they_were_written(path: Path) -> None:
    for asked in (QUESTIONS, QUESTIONS[:1]):  # Those not asked stay.
        found = read_records(path, RUN, asked)
        assert [one.question_id for one in found] == [2, 0]
    assert read_records(path.with_name("new.jsonl"), RUN, QUESTIONS) == []


def test_what_a_run_cannot_go_on_with_is_refused(path: Path) -> None:
    """A question in another place, too: its seed would be another one."""
    for change in ({"turns": ("other",)}, {"number": 9}):
        other = [dataclasses.replace(QUESTIONS[0], **change)]
        refused(
            lambda other=other: read_records(path, RUN, other),
            "answers another question 0: choose",
        )
    warmer = RUN | {"temperature": 1.0}
    refused(
        lambda: read_records(path, warmer, QUESTIONS),
        f"{path}: temperature was 0.0 and is 1.0 now",
    )
    path.write_bytes(path.read_bytes() + b"{}\n")
    message = f"{path}:4: `question_id` = None must be int or str"
    refused(lambda: read_records(path, RUN, QUESTIONS), message)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        *((n, None, f"`{n}` = None must be") for n in ("choices", "question_id")),
        *((n, None, f"`{n}` = None must be") for n in ("wall_time", "token_ids")),
        ("category", 5, "`category` = 5 must be str"),
        ("token_ids", [5], "`token_ids` = 5 must be list"),
        ("decoding_steps", [9], "do not fit each other"),
        ("turns", [None], "`turns` = None must be str"),
        ("accept_lengths", [1, 1, 1, -1], "`accept_lengths` holds -1"),
        ("wall_time", [-1.0], "`wall_time` holds -1.0"),
        ("wall_time", ["1"], "`wall_time` = '1' must be float"),
        ("wall_time", [1.0, 1.0], "do not fit each other"),
        ("nodes", {"trees": 1}, "`trees` = 1 must be list"),
    ],
)
def test_what_is_no_record_is_refused(name: str, value: Any, named: str) -> None:
    line = synthetic.record(1)
    inside = line if name in line else line["choices"][0]
    inside[name] = value
    with pytest.raises(InputError, match=re.escape(named)):
        Record.from_json(line)


def test_a_speed_is_of_all_tokens_and_all_time() -> None:
    fast, slow = (
        Record.from_json(synthetic.record(1, new_tokens=[5, 3], seconds=[time] * 2))
        for time in (1.0, 2.5)
    )
    assert speed([fast, slow]) == 16 / 7
    instant = synthetic.record(1, seconds=[0.0])
    assert speed([Record.from_json(instant)]) is None
    assert speed([]) is None
