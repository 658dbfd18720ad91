"""Commands whose chat template asks for today's date, gone on with on another day."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.evaluation.answers import Answerer
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import Record
from eagle_jax.evaluation.templates import encode
from eagle_jax.training import trainer
from tests.conftest import load_main

pytestmark = pytest.mark.usefixtures("quick_compilation")

# It is never the same day in both.
EAST, WEST = "Etc/GMT-14", "Etc/GMT+12"
DATED = "{{ strftime_now('%d %b %Y') }}"


@pytest.fixture
def where() -> Iterator[Any]:
    """Moves the clock to a time zone."""
    before = os.environ.get("TZ")

    def move(zone: str | None) -> None:
        if zone is None:
            os.environ.pop("TZ", None)
        else:
            os.environ["TZ"] = zone
        time.tzset()

    yield move
    move(before)


@pytest.fixture(scope="module")
def dated_pair(chat_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair, with a chat template that begins with today's date."""
    folder = tmp_path_factory.mktemp("dated") / "pair"
    shutil.copytree(chat_pair, folder)
    path = folder / "target" / "chat_template.jinja"
    path.write_text(DATED + path.read_text())
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    turns = [("user", "Hi"), ("assistant", "there")]
    record = {"messages": [{"role": r, "content": c} for r, c in turns]}
    path.write_text((json.dumps(record) + "\n") * 12)
    return path


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_regeneration_goes_on_with_the_date_that_it_began_with(
    dated_pair: Path, data: Path, tmp_path: Path, where: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, output = load_main("regenerate"), tmp_path / "out.jsonl"
    command = ["--target", f"{dated_pair}/target", "--data", str(data)]
    command += ["--output", str(output), "--max-new-tokens", "2"]
    where(EAST)
    assert run([*command, "--limit", "1"]) == 0
    where(WEST)
    assert run([*command, "--limit", "2"]) == 0
    first, second = _lines(output)
    size = first["loss_mask"].index(1)
    assert first["ids"][:size] == second["ids"][:size]
    settings = tmp_path / "out.jsonl.settings.json"
    undated = json.loads(settings.read_text())
    del undated["date"]
    settings.write_text(json.dumps(undated))
    assert run([*command, "--limit", "3"]) == 2
    assert "made with date = None, but now it is '20" in capsys.readouterr().err


def test_what_is_evaluated_on_another_day_gets_the_same_prompts(
    dated_pair: Path, tmp_path: Path, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = load_main("evaluate"), tmp_path / "records"
    (tmp_path / "prompts.txt").write_text("Hi\n")
    command = ["--target", f"{dated_pair}/target", "--template", "tokenizer"]
    command += ["--questions", f"{tmp_path}/prompts.txt", "--output", str(output)]
    prompts: list[list[int]] = []

    def answer(asked: Answerer, questions: Iterable[Question]) -> Iterator[Record]:
        for question in questions:
            turns = question.turns
            prompts.append(encode(asked.pair.tokenizer, "tokenizer", turns, []))
            yield Record(
                question_id=question.question_id,
                category=question.category,
                question=question.fingerprint,
                number=question.number,
                turns=(),
                run=asked.settings,
                step_seconds=None,
                nodes=None,
                model_id=asked.plan.model_id,
            )

    monkeypatch.setattr(Answerer, "answer", answer)
    where(EAST)
    assert run([*command, "--methods", "autoregressive"]) == 0
    where(WEST)
    assert run([*command, "--methods", "lookup", "autoregressive"]) == 0
    assert prompts == prompts[:1] * 2  # What was on record was not asked again.
    (tmp_path / "other").mkdir()
    assert run([*command[:-1], f"{tmp_path}/other", "--methods", "lookup"]) == 0
    assert prompts[2] != prompts[0]


def test_a_resumed_run_trains_on_the_rows_that_it_began_with(
    dated_pair: Path, data: Path, tmp_path: Path, where: Any,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    train, output = load_main("train"), tmp_path / "run"
    command = ["--target", f"{dated_pair}/target", "--data", str(data)]
    command += ["--output", str(output), "--row-length", "64", "--batch-size", "1"]
    rows = []

    def look(*given: Any) -> None:
        rows.append(given[0].data.rows.tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "_run", look)
    where(EAST)
    assert train(command) == 130
    where(WEST)
    assert train([*command, "--resume"]) == 130
    np.testing.assert_array_equal(*rows)
    undated = json.loads((output / "run.json").read_text())
    del undated["date"]
    (output / "run.json").write_text(json.dumps(undated))
    assert train([*command, "--resume"]) == 2
    assert "did not record which date" in capsys.readouterr().err
