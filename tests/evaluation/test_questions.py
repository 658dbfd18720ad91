"""Questions: their layouts, their choice, wrong files, and prompts as FastChat has."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.evaluation.questions import (
    Question,
    choose,
    encode,
    join_files,
    plain_questions,
    read_questions,
)
from tests.helpers import refused


def line(question_id: Any = 1, category: Any = "a", turns: Any = ("Hi",)) -> str:
    turns = list(turns) if isinstance(turns, tuple) else turns
    return json.dumps(
        {"question_id": question_id, "category": category, "turns": turns}
    )


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def numbered(count: int, categories: str = "ab") -> list[Question]:
    return [
        Question(
            question_id=number,
            category=categories[number % len(categories)],
            turns=("Hi",),
            number=number,
        )
        for number in range(count)
    ]


def test_a_line_is_a_question(tmp_path: Path) -> None:
    # A line separator inside a string ends no line; unknown fields are left alone.
    odd = '{"question_id": "x", "category": "b", "turns": ["a\u2028b"], "reference": 1}'
    path = write(tmp_path / "file.jsonl", line(7, "a", ("one", "two")), "", odd)
    assert read_questions(path) == [
        Question(question_id=7, category="a", turns=("one", "two"), number=0),
        Question(question_id="x", category="b", turns=("a\u2028b",), number=1),
    ]
    apart = plain_questions(path, ["one two"]) + read_questions(path)
    prints = {one.fingerprint for one in apart}
    assert [*map(len, prints)] == [16] * 3


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ('{"question_id": 1', "is not valid JSON"),
        ("[1]", "`turns` = None must be list"),
        ('{"category": "a", "turns": ["Hi"]}', "`question_id` = None must be int or"),
        (line(""), "none empty"),
        (line(category=None), "`category` = None must be str"),
        (line(turns=[]), "at least one turn"),
        (line(turns=["Hi", 2]), "a turn = 2 must be str"),
        (line(turns=["Hi", " "]), "none empty"),
        (line(turns=["\ud800"]), "must be Unicode text"),
        (line(0), "question_id 0 stands in an earlier line already"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, bad: str, named: str) -> None:
    path = write(tmp_path / "file.jsonl", line(0), bad)
    refused(lambda: read_questions(path), f"{path}:2", named)


def test_lines_of_speed_bench_are_read_in_both_forms(tmp_path: Path) -> None:
    own = {"question_id": "c3", "category": "coding", "sub_category": "python"}
    more = {"source": "x", "src_id": "7", "difficulty": None, "multiturn": True}
    said = [{"role": "user", "content": text} for text in ("one", "two")]
    table = own | more | {"turns": ["one", "two"]}
    prepared = own | more | {"question_id": "c4", "messages": said}
    path = write(tmp_path / "file.jsonl", json.dumps(table), json.dumps(prepared))
    assert [
        (one.question_id, one.category, one.turns) for one in read_questions(path)
    ] == [
        ("c3", "speed_bench_coding", ("one", "two")),
        ("c4", "speed_bench_coding", ("one", "two")),
    ]
    hidden = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    said[0]["role"] = "system"
    for bad, named in (
        (own | {"turns": [hidden]}, "fill it in with NVIDIA's prepare.py"),
        (own | {"messages": said}, "must all be the user's"),
    ):
        write(path, json.dumps(bad))
        refused(lambda: read_questions(path), f"{path}:1", named)


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    refused(lambda: read_questions(path), "file.jsonl")
    for content in (b"\xff\xfe", b" \n"):
        path.write_bytes(content)
        refused(lambda: read_questions(path), "file.jsonl")


def test_a_task_in_a_folder_is_not_taken_for_mt_bench(tmp_path: Path) -> None:
    def categories(folder: str, *names: str) -> list[str]:
        lines = [line(number, name) for number, name in enumerate(names)]
        path = write(tmp_path / folder / "question.jsonl", *lines)
        return [question.category for question in read_questions(path)]

    assert categories("gsm8k", "math", "math") == ["gsm8k", "gsm8k"]
    assert categories("alpaca", "") == ["alpaca"]
    assert categories("mt_bench", "math", "stem") == ["math", "stem"]
    assert categories("sum", "summarization") == ["summarization"]


def test_prompts_are_questions_of_one_turn(tmp_path: Path) -> None:
    questions = plain_questions(tmp_path / "mine.txt", ["one", "two"])
    assert [(q.question_id, q.category, q.turns) for q in questions] == [
        (0, "mine", ("one",)),
        (1, "mine", ("two",)),
    ]
    refused(lambda: plain_questions(tmp_path / "mine.txt", ["one", "  "]), "prompt 1")


def test_several_files_keep_their_questions_apart() -> None:
    first, second = Path("gsm8k/question.jsonl"), Path("other/mine.jsonl")
    alone = join_files([(first, numbered(2))])
    assert [q.question_id for q in alone] == [0, 1]
    joined = join_files([(first, numbered(2)), (second, numbered(2))])
    ids = [q.question_id for q in joined]
    assert ids == ["gsm8k-0", "gsm8k-1", "mine-0", "mine-1"]
    assert [q.number for q in joined] == [0, 1, 2, 3]
    refused(lambda: join_files([(second, []), (second, [])]), "are called mine; give")


def test_a_sample_is_the_same_everywhere_and_part_of_a_larger_one() -> None:
    questions = numbered(40)
    small, large = (choose(questions, count) for count in (3, 8))
    # Pinned: another order would mix two samples in one file of records.
    assert [q.question_id for q in small] == [0, 8, 11, 15, 32, 37]
    assert set(small) < set(large)
    assert [q.number for q in large] == sorted(q.number for q in large)
    assert [q.category for q in large].count("b") == 8
    assert choose(questions, 100) == choose(questions, None) == questions
    # It does not depend on the categories beside it.
    alone = choose([q for q in questions if q.category == "b"], 3)
    assert alone == [q for q in small if q.category == "b"]
    refused(lambda: choose(questions, 0), "per_category = 0 must be at least 1")


# What FastChat's `Conversation.get_prompt` gives for these turns.
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. "
    "USER: One? ASSISTANT: Yes.</s>USER: Two? ASSISTANT:"
)
TURNS, ANSWERS = ["One?", "Two?"], [" Yes.\n"]


@pytest.mark.parametrize(
    ("template", "turns", "answers", "expected"),
    [
        ("vicuna", TURNS, ANSWERS, VICUNA),
        ("vicuna", TURNS[:1], [], VICUNA[: VICUNA.index(" Yes")]),
        # No separator follows an empty answer.
        ("vicuna", TURNS, ["\n"], VICUNA.replace(" Yes.</s>", "")),
        # Indentation stays.
        ("none", ["def f():", "f()"], ["\n    g\n"], "def f():\n\n    g\n\nf()"),
    ],
)
def test_the_text_is_fastchats_or_plain_turns_after_one_bos(
    template: Any, turns: list[str], answers: list[str], expected: str, tokenizer: Any
) -> None:
    first, *ids = encode(tokenizer, template, turns, answers)
    assert first == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == expected


def test_the_tokenizers_own_template_writes_its_own_bos(tokenizer: Any) -> None:
    ids = encode(tokenizer, "tokenizer", TURNS, ANSWERS)
    expected = "<s>[user]One?[assistant]Yes.</s>[user]Two?[assistant]"
    assert tokenizer.decode(ids) == expected
    assert ids.count(tokenizer.bos_token_id) == 1
