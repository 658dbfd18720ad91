"""One record both ways: what is written is what is read."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import Nodes, VerifiedTree
from eagle_jax.evaluation.records import Record, speed
from tests.evaluation import synthetic

C = "choices[0]."


def test_a_line_is_read_back_and_written_again(tmp_path: Path) -> None:
    for path in synthetic.write_evaluation(tmp_path, questions=1).iterdir():
        line = path.read_text()
        record = Record.from_json(json.loads(line))
        assert json.dumps(record.to_json()) + "\n" == line


def test_records_with_trees_and_without_places_are_read() -> None:
    tree = VerifiedTree(
        parents=np.array([-1, 0]),
        log_values=np.array([0.0, -1.0]),
        is_node=np.ones(2, bool),
        accepted=[1],
    )
    line = synthetic.record(1, nodes=Nodes.of([tree]))
    del line["number"]
    line["nodes"]["trees"] = [{"parents": [-1, 0]}]
    record = Record.from_json(line)
    assert record.number is None
    assert record.nodes is not None and record.nodes.drafted == 1


TRIED = {"depth": [1, 2], "rank": [0], "log_confidence": [0], "is_accepted": [1]}
NODES = Nodes.of([]).to_json()


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        *((n, None, f"no field `{n}`") for n in ("run", "choices", "question_id")),
        *((n, None, f"no field `{C}{n}`") for n in ("wall_time", "token_ids")),
        ("category", 5, "`category` is no str"),
        ("token_ids", [[1]], "does not count `choices[0].token_ids`"),
        ("token_ids", [5], "no list of lists"),
        ("decoding_steps", [9], "does not count `choices[0].accept_lengths`"),
        ("turns", [None], "hold None"),
        ("accept_lengths", [1, 1, 1, -1], "holds -1"),
        ("accept_lengths", [1, 1, 1, 0], "holds 0; a step emits 1 or more"),
        ("wall_time", [-1.0], "`choices[0].wall_time` holds -1.0"),
        ("wall_time", ["1"], "`choices[0].wall_time` holds '1'"),
        ("wall_time", [True], "`choices[0].wall_time` holds True"),
        ("wall_time", [1.0, 1.0], "different numbers of turns"),
        ("nodes", {"tried": TRIED}, "`nodes.tried` differ in length"),
        ("nodes", {"tried": {name: [0] for name in TRIED}}, "depth below 1"),
        ("nodes", {"tried": TRIED | {"depth": ["x"]}}, "no number"),
        ("nodes", {"rounds": 1.5}, "`nodes.rounds` is no int"),
    ],
)
def test_what_is_no_record_is_refused(name: str, value: Any, named: str) -> None:
    line = synthetic.record(1)
    inside = line if name in line else line["choices"][0]
    inside[name] = NODES | value if name == "nodes" else value
    if value is None:
        del inside[name]
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
