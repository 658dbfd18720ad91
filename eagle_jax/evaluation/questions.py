"""Questions of an evaluation: files of Spec-Bench and SPEED-Bench, and their prompts.

A line of such a file, as of MT-bench's too, holds `question_id`, `category` and
`turns` or, as SPEED-Bench's script writes them, `messages`; others are left alone.
"""

import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from eagle_jax.config import require
from eagle_jax.engine import wording
from eagle_jax.errors import InputError
from eagle_jax.parsing import check_type, parse_json, value_at

QuestionId = int | str

_HALF = re.compile("[\ud800-\udfff]")

MT_BENCH = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}
"""The categories of MT-bench, which are one task of Spec-Bench."""

_UNFILLED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""What SPEED-Bench's table holds in place of questions that it may not pass on."""

Template = Literal["tokenizer", "vicuna", "none"]
"""Names of the forms in which turns become a prompt.

`tokenizer` is the chat template that the tokenizer carries; `none` writes turns and
answers one after the other, for models that are no chat models.
"""

TEMPLATES: tuple[Template, ...] = typing.get_args(Template)

_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_WRITTEN = {
    # FastChat's text (`vicuna_v1.1`), which has no separator after an empty answer;
    # Vicuna's own tokenizer carries no template.
    "vicuna": _VICUNA_SYSTEM + " {% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} ASSISTANT:"
    "{% elif message.content %} {{ message.content }}</s>"
    "{% endif %}{% endfor %}",
    "none": "{{ messages | map(attribute='content') | join('\n\n') }}",
}
"""The forms that no tokenizer carries, as chat templates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question to a model, one turn after the other.

    Attributes:
        question_id: The question's id, unique in an evaluation.
        category: The name of the kind of question.
        turns: The user's turns, at least one, none empty.
        number: The number among all questions of all files, from 0; seeds are made of
            it, so it does not depend on which questions are chosen.
    """

    question_id: QuestionId
    category: str
    turns: tuple[str, ...]
    number: int

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for the turns."""
        return _hash(json.dumps(self.turns))[:16]


def read_questions(path: Path) -> list[Question]:
    """Reads a `.jsonl` file of questions.

    The EAGLE repository keeps each task in a folder as `question.jsonl`, and says
    nothing or, for GSM8K, "math" as a category, which is one of MT-bench's. Such a
    file's category is its folder's name, so that tasks are not mixed up.

    Raises:
        InputError: If the file cannot be read or holds no question, or a line is wrong,
            which is named.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the questions {path}: {error}") from error
    found: dict[str, Question] = {}
    # JSON strings may hold line separators at which `splitlines` would cut.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        question = _question(parse_json(line, where), where, len(found))
        if found.setdefault(str(question.question_id), question) is not question:
            raise InputError(
                f"{where}: question_id {question.question_id!r} stands in an earlier "
                "line already; give every question its own"
            )
    if not found:
        raise InputError(f"{path} holds no question")
    categories = {question.category for question in found.values()}
    is_mixed_up = len(categories) == 1 and categories <= MT_BENCH
    own = path.stem == "question" and is_mixed_up
    return [
        dataclasses.replace(question, category=_name(path))
        if own or not question.category
        else question
        for question in found.values()
    ]


def plain_questions(path: Path, prompts: Sequence[str]) -> list[Question]:
    """Returns a question of one turn per prompt; its category is the file's stem."""
    questions = []
    for number, prompt in enumerate(prompts):
        record = {"question_id": number, "category": path.stem, "turns": [prompt]}
        questions.append(_question(record, f"{path}: prompt {number}", number))
    return questions


def join_files(files: Sequence[tuple[Path, Sequence[Question]]]) -> list[Question]:
    """Returns the questions of several files together.

    Those of a single file keep their ids; with several files an id gets its file's name
    in front, or its folder's: question 12 of `gsm8k/question.jsonl` is "gsm8k-12".
    """
    if len(files) == 1:
        return list(files[0][1])
    joined, names = list[Question](), set[str]()
    for path, questions in files:
        if (name := _name(path)) in names:
            raise InputError(
                f"two of the question files are called {name}; give each file once "
                "and under a name of its own"
            )
        names.add(name)
        for one in questions:
            id_, number = f"{name}-{one.question_id}", len(joined)
            joined.append(dataclasses.replace(one, question_id=id_, number=number))
    return joined


def choose(questions: Sequence[Question], per_category: int | None) -> list[Question]:
    """Returns some of the questions in their order, the same ones on every machine.

    A smaller sample is part of a larger one.

    Args:
        questions: All questions.
        per_category: The largest number of questions per category; `None` for all.
    """
    if per_category is not None:
        require(per_category >= 1, "per_category", per_category, "at least 1")
    chosen: set[int] = set()
    for category in {question.category for question in questions}:
        members = [question for question in questions if question.category == category]
        # Hashes order them as well as chance does, and alike on every machine.
        members.sort(key=lambda question: _hash(f"{category}:{question.question_id}"))
        chosen.update(question.number for question in members[:per_category])
    return [question for question in questions if question.number in chosen]


def encode(
    tokenizer: Any,
    template: Template,
    turns: Sequence[str],
    answers: Sequence[str],
) -> list[int]:
    """Returns the ids of a conversation up to where the model goes on.

    Args:
        tokenizer: A `transformers` tokenizer; it puts its own special tokens around
            all but its own template, which writes them itself.
        template: The form of the prompt.
        turns: The user's turns, the one to be answered last.
        answers: The model's answers to the turns before; white space around them is
            left out, only line breaks for "none".
    """
    messages = []
    for turn, answer in zip(turns, answers, strict=False):
        said = answer.strip("\n") if template == "none" else answer.strip()
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": said})
    messages.append({"role": "user", "content": turns[-1]})
    if template != "tokenizer":
        written = tokenizer.apply_chat_template(
            messages, chat_template=_WRITTEN[template], tokenize=False
        )
        return wording.encode(tokenizer, written)
    return wording.encode(tokenizer, messages)


def get(record: Any, name: str, kind: Any) -> Any:
    """Returns a field, and refuses one that is missing or of another type."""
    return check_type(kind, value_at(record, name), f"`{name}`")


def _name(path: Path) -> str:
    # The folder's name is that of a link, and not of its target.
    return path.absolute().parent.name if path.stem == "question" else path.stem


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _question(record: Any, where: str, number: int) -> Question:
    try:
        if (said := get(record, "messages", list | None)) is not None:
            turns = [get(one, "content", str) for one in said]
            if any(get(one, "role", str) != "user" for one in said):
                raise InputError("`messages` must all be the user's")
        else:
            turns = get(record, "turns", list)
        category = get(record, "category", str)
        if value_at(record, "sub_category") is not None:
            # Some of SPEED-Bench's kinds have the names of MT-bench's.
            category = f"speed_bench_{category}"
        question = Question(
            question_id=get(record, "question_id", int | str),
            category=category,
            turns=tuple(check_type(str, turn, "a turn") for turn in turns),
            number=number,
        )
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    filled = (str(question.question_id), *question.turns)
    is_text = _HALF.search("".join((*filled, question.category))) is None
    if not turns or not is_text or not all(one.strip() for one in filled):
        raise InputError(
            f"{where}: an id and at least one turn must be Unicode text, none empty"
        )
    if any(_UNFILLED in turn for turn in turns):
        raise InputError(
            f"{where}: SPEED-Bench passes this question on without its text; "
            "fill it in with NVIDIA's prepare.py"
        )
    return question
