"""Questions that a target writes as a user of its own chat template would."""

from pathlib import Path
from typing import Any

import pytest

from eagle_jax.decoding.state import StopReason
from eagle_jax.training.questions import Questions, opening, read_systems
from tests.helpers import refused
from tests.training.test_regenerate import writer_of, written


def test_an_opening_is_the_template_up_to_what_a_user_says(tokenizer: Any) -> None:
    assert tokenizer.decode(opening(tokenizer, "")) == "<s>[user]"
    assert tokenizer.decode(opening(tokenizer, "Be")) == "<s>[system]Be[user]"


def test_a_template_that_changes_what_users_say_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].role }}")
    refused(lambda: opening(tokenizer, ""), "changes what a user says", "`data`")


def test_questions_are_sized_new_and_no_loops() -> None:
    questions = Questions(["What is the capital of France?"])
    cases = {
        "What is it?": True,
        "Why?": False,
        "what is THE capital, of France": False,
        " ".join(f"word{n}" for n in range(1500)): True,
        " ".join(f"w{n}" for n in range(1501)): False,
        "again and again " * 20: False,
        "one two three four five six seven eight nine ten eleven twelve but": True,
        "one two three four five six seven eight nine ten eleven twelve so": False,
    }
    assert {text: questions.keep(text) for text in cases} == cases


def test_systems_take_turns_and_what_was_cut_off_is_no_question(tokenizer: Any) -> None:
    systems = ["", "Be"]
    records, asked = written(writer_of(tokenizer).questions(5, systems))
    assert [tokenizer.decode(text.prompt_ids) for text in asked[:3]] == [
        "<s>[user]",
        "<s>[system]Be[user]",
        "<s>[user]",
    ]
    roles = [[m["role"] for m in record["messages"]] for record in records]
    assert roles == [["user"], ["system", "user"]] * 2 + [["user"]]
    assert len({text.request.seed for text in asked}) == 5
    cut, _ = written(
        writer_of(tokenizer).questions(3, systems), stop=StopReason.MAX_TOKENS
    )
    assert cut == [None] * 3


def test_systems_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "systems.txt"
    path.write_text("\ufeff\n Be brief. \n")
    assert read_systems(path) == ["", "Be brief."]
    path.write_text("")
    refused(lambda: read_systems(path), "is empty; write what the system says")
    refused(lambda: read_systems(tmp_path / "none"), "cannot read")
