"""One record both ways: what is written is what is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.errors import InputError
from eagle_jax.evaluation.records import Record, speed
from tests.evaluation import synthetic


def test_a_line_is_read_back_and_written_again(tmp_path: Path) -> None:
    for path in synthetic.write_evaluation(tmp_path, questions=1).iterdir():
        _, line = path.read_text().splitlines()
        record = Record.from_json(json.loads(line))
        assert json.dumps(record.to_json()) == line


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
        ("accept_lengths", [1, 1, 1, 0], "`accept_lengths` holds 0"),
        ("wall_time", [-1.0], "`wall_time` holds -1.0"),
        ("wall_time", ["1"], "`wall_time` = '1' must be float"),
        ("wall_time", [True], "`wall_time` = True must be float"),
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


def answer(*turns: list[int], seconds: float = 1.0) -> Record:
    times = [seconds] * len(turns)
    line = synthetic.record(1, token_ids=turns, seconds=times, decode_seconds=times)
    return Record.from_json(line)


def test_without_prefill_a_turns_first_token_does_not_count() -> None:
    records = [answer([1] * 11, [1] * 6, seconds=2.5)]
    assert speed(records, with_prefill=True) == 17 / 5
    assert speed(records, with_prefill=False) == 15 / 5


def test_there_is_no_speed_where_nothing_was_decoded() -> None:
    assert speed([answer([1])], with_prefill=False) is None
    assert speed([answer([1] * 5, seconds=0.0)], with_prefill=True) is None
    assert speed([], with_prefill=True) is None
