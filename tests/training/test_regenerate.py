from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_jax.engine.served import Served

from eagle_jax.decoding.state import StopReason
from eagle_jax.engine.request import Request
from eagle_jax.engine.rows import Row
from eagle_jax.logs import JsonLines
from eagle_jax.training.conversations import Example
from eagle_jax.training.regenerate import next_index, regenerate, seed_of
from eagle_jax.training.tasks import Task, example_tasks, sample_tasks
from tests.chats import BOS, CHATS, EOS
from tests.helpers import refused


def _chats() -> list[Example]:
    return [
        Example(
            where=f"line {number}",
            messages=tuple({"role": r, "content": c} for r, c in turns),
        )
        for number, turns in enumerate(CHATS, 1)
    ]


class Parrot:
    """Answers with a token of its seed; keeps what it was asked."""

    def __init__(self, *, stop: StopReason = StopReason.STOP_TOKEN, rows: int = 2):
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self._waiting: list[tuple[int, list[int], int]] = []
        self._rows, self._stop = rows, stop

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def request(self, seed: int) -> Request:
        return Request(seed=seed)

    def add(self, key: int, prompt_ids: list[int], settings: Request) -> None:
        self.asked.append((tuple(prompt_ids), settings.seed))
        self._waiting.append((key, prompt_ids, settings.seed))

    def step(self) -> Iterator[Served]:
        """Answers as many as it has rows, the newest first."""
        taken = self._waiting[: self._rows]
        self._waiting = self._waiting[self._rows :]
        for key, prompt, seed in reversed(taken):
            row = Row(
                prompt_ids=prompt,
                generated_ids=[token_of(seed), EOS],
                stop_reason=self._stop,
                accept_lengths=[],
            )
            yield Served(key=key, row=row, prefill_seconds=0, decode_seconds=0)


def token_of(seed: int) -> int:
    return 65 + seed % 7


def _all(tasks: list[Task], answer: Any, **settings: Any) -> list[Any]:
    defaults = {"ahead": 2, "max_length": 200, "seed": 3}
    return list(regenerate(tasks, answer, **(defaults | settings)))


def _chat_tasks(tokenizer: Any, refused: list[str] | None = None) -> list[Task]:
    told = [] if refused is None else refused
    return list(example_tasks(tokenizer, _chats(), (1, 64), 3, told))


def _records(examples: list[Example], tokenizer: Any, seed: int = 3) -> list[Any]:
    tasks = list(example_tasks(tokenizer, examples, (3, 6), seed, []))
    return [record for _, record in _all(tasks, Parrot())]


def test_a_conversation_is_answered_turn_by_turn(tokenizer: Any) -> None:
    parrot = Parrot()
    records = [record for _, record in _all(_chat_tasks(tokenizer), parrot)]
    turns = [[(m["role"], m["content"]) for m in r["messages"]] for r in records]
    # Users keep their words, and the turn without an answer gets one.
    assert [[c for r, c in t if r != "assistant"] for t in turns] == [
        ["Be", "Hi", "So"],
        ["One"],
        ["Two", "Three", "Four"],
    ]
    assert [[r for r, _ in t if r != "system"] for t in turns] == [
        ["user", "assistant"] * count for count in (2, 1, 3)
    ]
    answers = [tokenizer.decode([token_of(seed_of(3, 2, turn))]) for turn in (0, 2)]
    assert [turns[2][1][1], turns[2][5][1]] == [answer.strip() for answer in answers]
    first = "<s>[system]Be[user]Hi[assistant]"
    assert tokenizer.decode(list(parrot.asked[0][0])) == first


def test_the_ids_are_those_that_were_read_and_written(tokenizer: Any) -> None:
    parrot = Parrot()
    records = [record for _, record in _all(_chat_tasks(tokenizer), parrot)]
    last = {seed: prompt for prompt, seed in parrot.asked}[seed_of(3, 2, 2)]
    assert records[2]["ids"] == [*last, token_of(seed_of(3, 2, 2)), EOS]
    for record in records:
        ids, mask = np.array(record["ids"]), np.array(record["loss_mask"])
        ends = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        answers = [m for m in record["messages"] if m["role"] == "assistant"]
        shown = [tokenizer.decode(ids[a:b].tolist()) for a, b in ends]
        earlier = [f"{answer['content']}</s>" for answer in answers[:-1]]
        assert shown[:-1] == earlier and len(shown) == len(answers)


@pytest.mark.parametrize("rows", [1, 2, 3, 50])
def test_no_text_depends_on_what_is_decoded_beside_it(
    tokenizer: Any, rows: int
) -> None:
    whole = _all(_chat_tasks(tokenizer), Parrot())
    assert _all(_chat_tasks(tokenizer), Parrot(rows=rows), ahead=rows) == whole
    assert [index for index, _ in whole] == [0, 1, 2]
    later = _all(_chat_tasks(tokenizer), Parrot(rows=rows), ahead=rows, first=1)
    assert later == whole[1:]


def test_seeds_share_nothing_between_texts_turns_and_runs() -> None:
    seeds = {seed_of(s, i, t) for s in range(4) for i in range(20) for t in range(4)}
    assert len(seeds) == 4 * 20 * 4
    assert min(seeds) >= 0 and max(seeds) < 2**32


def test_a_conversation_ends_with_an_answer_that_was_cut_off(tokenizer: Any) -> None:
    records = _all(_chat_tasks(tokenizer), Parrot(stop=StopReason.MAX_TOKENS))
    assert [len(record["messages"]) for _, record in records] == [3, 2, 2]


def test_a_conversation_ends_where_there_is_no_room(tokenizer: Any) -> None:
    parrot = Parrot()
    _all(_chat_tasks(tokenizer), parrot)
    prompts = [len(prompt) for prompt, _ in parrot.asked]
    records = _all(_chat_tasks(tokenizer), Parrot(), max_length=max(prompts))
    assert [len(record["messages"]) for _, record in records] == [5, 2, 4]
    records = _all(_chat_tasks(tokenizer), Parrot(), max_length=min(prompts))
    assert [record for _, record in records] == [None, None, None]


def test_a_conversation_that_the_template_refuses_is_left_out(tokenizer: Any) -> None:
    before = tokenizer.chat_template
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No') }}"
    tokenizer.chat_template = refusing + "{% endif %}" + before
    refused: list[str] = []
    try:
        records = _all(_chat_tasks(tokenizer, refused=refused), Parrot())
    finally:
        tokenizer.chat_template = before
    assert [record is None for _, record in records] == [True, False, False]
    assert refused == ["line 1: the chat template refuses the conversation: No"]


def test_a_document_is_gone_on_with_after_a_random_prefix(tokenizer: Any) -> None:
    text = "there is another one that he likes"
    examples = [Example(where="", text=text)] * 60
    records = _records(examples, tokenizer)
    ids = tokenizer(text).input_ids
    sizes = [record["loss_mask"].count(0) - 1 for record in records]
    assert set(sizes) == {3, 4, 5, 6}  # The start token is not counted.
    for size, record in zip(sizes, records, strict=True):
        assert record["ids"][: size + 1] == ids[: size + 1]
        assert record["loss_mask"] == [0] * (size + 1) + [1, 1]
        kept = tokenizer.decode(ids[1 : size + 1])
        assert record["text"].startswith(kept) and text.startswith(kept)
    assert _records(examples, tokenizer) == records
    assert _records(examples, tokenizer, seed=4) != records


def test_short_documents_keep_what_they_have(tokenizer: Any) -> None:
    ids = np.array([BOS, 5], np.int32)
    examples = [Example(where="", text="he"), Example(where="", ids=ids)]
    tasks = example_tasks(tokenizer, examples, (40, 50), 0, [])
    assert [next(task) for task in tasks] == [tokenizer("he").input_ids, [BOS, 5]]


def test_samples_begin_with_the_start_token(tokenizer: Any) -> None:
    records = [r for _, r in _all(list(sample_tasks(tokenizer, 3)), Parrot())]
    assert [record["ids"][0] for record in records] == [BOS] * 3
    assert [record["loss_mask"] for record in records] == [[0, 1, 1]] * 3

    class Startless:
        bos_token_id = None

    refused(lambda: sample_tasks(Startless(), 3), "needs a start token")


def test_a_file_is_gone_on_with_after_its_last_text(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with JsonLines(path, {"index": 3}) as lines:
        assert next_index(path) == 0
        for index in (0, 4):
            lines.append({"index": index, "text": "a" * 3_000_000})
            assert next_index(path) == index + 1
        lines.append({"text": "mine"})
    refused(lambda: next_index(path), f"{path}:4: index = None must be int")
