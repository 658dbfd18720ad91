"""One record both ways: what is written is what is read."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import Nodes, VerifiedTree
from eagle_jax.evaluation.records import Record
from tests.evaluation import synthetic


def test_a_line_is_read_back_and_written_again(tmp_path: Path) -> None:
    for path in synthetic.write_evaluation(tmp_path, questions=1).iterdir():
        line = path.read_text()
        record = Record.from_json(json.loads(line))
        assert json.dumps(record.to_json()) + "\n" == line


def test_records_of_before_places_and_trees_were_kept_are_read() -> None:
    tree = VerifiedTree(
        parents=np.array([-1, 0]),
        log_values=np.array([0.0, -1.0]),
        is_node=np.ones(2, bool),
        accepted=[1],
    )
    line = synthetic.record(1, nodes=Nodes.of([tree]))
    del line["number"], line["nodes"]["trees"]
    record = Record.from_json(line)
    assert record.number is None
    assert record.nodes is not None and record.nodes.trees == ()


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("token_ids", [[1]], "does not count `choices[0].token_ids`"),
        ("token_ids", [5], "no list of lists"),
        ("decoding_steps", [9], "does not count `choices[0].accept_lengths`"),
        ("turns", [None], "hold None"),
        ("accept_lengths", [1, 1, 1, -1], "holds -1"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(
    name: str, value: object, named: str
) -> None:
    line = synthetic.record(1)
    line["choices"][0][name] = value
    with pytest.raises(InputError, match=re.escape(named)):
        Record.from_json(line)


def test_the_first_difference_is_found_turn_by_turn() -> None:
    def answer(*turns: list[int]) -> Record:
        times = [1.0] * len(turns)
        line = synthetic.record(1, token_ids=turns, seconds=times, decode_seconds=times)
        return Record.from_json(line)

    text = answer([1, 2], [3, 4, 5])
    assert text.difference(answer([1, 2], [3, 4, 5])) is None
    # What follows the first difference does not matter.
    assert text.difference(answer([1, 9], [9])) == (0, 1)
    assert text.difference(answer([1, 2], [3, 4, 6])) == (1, 2)
    # A text that ends earlier, or has a turn less, differs there.
    assert text.difference(answer([1, 2], [3, 4])) == (1, 2)
    assert text.difference(answer([1, 2])) == (1, 0)
