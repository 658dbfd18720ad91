import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.errors import InputError
from eagle_jax.generation.tokenizer import load_tokenizer
from eagle_jax.training.config import RegenerationConfig
from eagle_jax.training.conversations import Example
from eagle_jax.training.regenerate import regenerate, seed_of
from eagle_jax.training.resumable import ResumableLines
from eagle_jax.training.tasks import Answer, Task, example_tasks, sample_tasks
from tests.chats import BOS, CHATS, EOS
from tests.helpers import refused


@pytest.fixture(scope="module")
def tokenizer(chat_pair: Path) -> Any:
    return load_tokenizer(chat_pair / "target", 300)


def _chats() -> list[Example]:
    return [
        Example(
            where=f"line {number}",
            messages=tuple({"role": r, "content": c} for r, c in turns),
        )
        for number, turns in enumerate(CHATS, 1)
    ]


class Parrot:
    """Answers with its seed's last digits; keeps what it was asked."""

    def __init__(self, *, cut: str | None = None, rows: int = 2) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self._waiting: list[tuple[int, int]] = []
        self._rows = rows
        self._cut = cut

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, key: int, prompt_ids: list[int], seed: int) -> None:
        self.asked.append((tuple(prompt_ids), seed))
        self._waiting.append((key, seed))

    def step(self) -> Iterator[tuple[int, Answer]]:
        """Answers as many as it has rows, the newest first."""
        taken = self._waiting[: self._rows]
        self._waiting = self._waiting[self._rows :]
        for key, seed in reversed(taken):
            yield (
                key,
                Answer(
                    ids=[65 + seed % 7, EOS],
                    text=f" {seed % 7} ",
                    is_complete=self._cut is None,
                ),
            )


def _all(tasks: list[Task], answer: Any, **settings: Any) -> list[Any]:
    defaults = {"ahead": 2, "max_length": 200, "seed": 3}
    return list(regenerate(tasks, answer, **(defaults | settings)))


def _chat_tasks(tokenizer: Any, refused: list[str] | None = None) -> list[Task]:
    return list(example_tasks(tokenizer, _chats(), RegenerationConfig(), 3, refused))


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
    digits = [str(seed_of(3, index, turn) % 7) for index, turn in ((2, 0), (2, 2))]
    assert [turns[2][1][1], turns[2][5][1]] == digits
    first = "<s>[system]Be[user]Hi[assistant]"
    assert tokenizer.decode(list(parrot.asked[0][0])) == first


def test_the_ids_are_those_that_were_read_and_written(tokenizer: Any) -> None:
    parrot = Parrot()
    records = [record for _, record in _all(_chat_tasks(tokenizer), parrot)]
    last = {seed: prompt for prompt, seed in parrot.asked}[seed_of(3, 2, 2)]
    assert records[2]["ids"] == [*last, 65 + seed_of(3, 2, 2) % 7, EOS]
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
    records = _all(_chat_tasks(tokenizer), Parrot(cut="off"))
    assert [len(record["messages"]) for _, record in records] == [3, 2, 2]


def test_a_conversation_ends_where_there_is_no_room(tokenizer: Any) -> None:
    prompts = [len(prompt) for prompt, _ in _asked(tokenizer)]
    records = _all(_chat_tasks(tokenizer), Parrot(), max_length=max(prompts))
    assert [len(record["messages"]) for _, record in records] == [5, 2, 4]
    records = _all(_chat_tasks(tokenizer), Parrot(), max_length=min(prompts))
    assert [record for _, record in records] == [None, None, None]


def _asked(tokenizer: Any) -> list[tuple[tuple[int, ...], int]]:
    parrot = Parrot()
    _all(_chat_tasks(tokenizer), parrot)
    return parrot.asked


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


def test_a_conversation_ends_before_a_turn_that_the_template_cannot_mark(
    tokenizer: Any,
) -> None:
    before = tokenizer.chat_template
    tokenizer.chat_template = (  # Qwen3's shows what was thought in the last turn.
        "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == "
        "'assistant' %}<think>{% endif %}{{ m.content }}{% endfor %}"
    )
    refused: list[str] = []
    try:
        records = _all(_chat_tasks(tokenizer, refused=refused), Parrot())
    finally:
        tokenizer.chat_template = before
    assert [len(record["messages"]) for _, record in records] == [3, 2, 2]
    assert [line.split(":")[0] for line in refused] == ["line 1", "line 3"]


def test_a_document_is_gone_on_with_after_a_random_prefix(tokenizer: Any) -> None:
    text = "there is another one that he likes"
    examples = [Example(where="", text=text)] * 60
    settings = RegenerationConfig(min_prefix=3, max_prefix=6)
    records = [
        record
        for _, record in _all(
            list(example_tasks(tokenizer, examples, settings, 3)), Parrot()
        )
    ]
    ids = tokenizer(text).input_ids
    sizes = [record["loss_mask"].count(0) - 1 for record in records]
    assert set(sizes) == {3, 4, 5, 6}  # The start token is not counted.
    for size, record in zip(sizes, records, strict=True):
        assert record["ids"][: size + 1] == ids[: size + 1]
        assert record["loss_mask"] == [0] * (size + 1) + [1, 1]
        kept = tokenizer.decode(ids[1 : size + 1])
        assert record["text"].startswith(kept + " ") and text.startswith(kept)
    again = [
        r
        for _, r in _all(
            list(example_tasks(tokenizer, examples, settings, 3)), Parrot()
        )
    ]
    other = [
        r
        for _, r in _all(
            list(example_tasks(tokenizer, examples, settings, 4)), Parrot()
        )
    ]
    assert again == records and other != records


def test_short_documents_keep_what_they_have(tokenizer: Any) -> None:
    ids = np.array([BOS, 5], np.int32)
    examples = [Example(where="", text="he"), Example(where="", ids=ids)]
    settings = RegenerationConfig(min_prefix=40, max_prefix=50)
    tasks = example_tasks(tokenizer, examples, settings, 0)
    assert [task.prompt() for task in tasks] == [tokenizer("he").input_ids, [BOS, 5]]


def test_samples_begin_with_the_start_token(tokenizer: Any) -> None:
    records = [r for _, r in _all(list(sample_tasks(tokenizer, 3)), Parrot())]
    assert [record["ids"][0] for record in records] == [BOS] * 3
    assert [record["loss_mask"] for record in records] == [[0, 1, 1]] * 3

    class Startless:
        bos_token_id = None

    refused(lambda: sample_tasks(Startless(), 3), "needs a start token")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
        ({"batch_size": 0}, "batch_size = 0 must be at least 1"),
        ({"max_length": 1}, "max_length = 1 must be at least 2"),
        ({"min_prefix": 5, "max_prefix": 4}, "min_prefix = 5 must be 0 to max_prefix"),
        ({"min_prefix": -1}, "min_prefix = -1"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], named: str) -> None:
    refused(lambda: RegenerationConfig(**values), named)


# The file that is gone on with.


def test_lines_are_gone_on_with_after_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableLines(path, {"a": (1, 2)}) as lines:
        lines.append({"index": 0, "text": "Zoë\u2028\ud83d"})
        lines.append({"index": 4})
        assert lines.next_index == 5
        with pytest.raises(AssertionError):
            lines.append({"index": 4})
    whole = path.read_bytes()
    assert json.loads(whole.split(b"\n")[0])["text"] == "Zoë\u2028?"
    path.write_bytes(whole + b'{"index": 5, "te')
    with ResumableLines(path, {"a": [1, 2]}) as lines:
        assert lines.next_index == 5
        assert path.read_bytes() == whole
    path.write_bytes(whole[:9])
    with ResumableLines(path, {"a": [1, 2]}) as lines:
        assert lines.next_index == 0
    assert path.read_bytes() == b""


def test_a_long_last_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableLines(path, {}) as lines:
        lines.append({"index": 7, "text": "a" * 3_000_000})
    with ResumableLines(path, {}) as lines:
        assert lines.next_index == 8


def test_lines_of_other_settings_or_makers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableLines(path, {"seed": 1}) as lines:
        lines.append({"index": 0})
    before = path.read_bytes()
    for settings in ({"seed": 2}, {}, {"seed": 1, "new": 0}):
        refused(lambda given=settings: ResumableLines(path, given), "was made with")
    (tmp_path / "out.jsonl.settings.json").unlink()
    refused(
        lambda: ResumableLines(path, {"seed": 1}),
        "made by something else;",
        "`overwrite`",
    )
    assert path.read_bytes() == before
    with ResumableLines(path, {"seed": 2}, overwrite=True) as lines:
        assert lines.next_index == 0
    path.write_text("no record\n")
    refused(lambda: ResumableLines(path, {"seed": 2}), "no record of this command")
    refused(lambda: ResumableLines(tmp_path, {}), "it is no file")
    refused(
        lambda: ResumableLines(tmp_path / "nowhere" / "out.jsonl", {}),
        "cannot write",
        "No such file",
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_writer_is_refused(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableLines(path, {}) as lines:
        lines.append({"index": 0})
        refused(
            lambda: ResumableLines(path, {}, overwrite=overwrite),
            "is being written by another process",
        )
        lines.append({"index": 1})
    with ResumableLines(path, {}) as lines:
        assert lines.next_index == 2


def test_a_full_disk_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    lines = ResumableLines(tmp_path / "out.jsonl", {})
    lines.close()
    monkeypatch.setattr(lines, "_file", Full())
    with pytest.raises(InputError, match=r"No space left .* free some space"), lines:
        lines.append({"index": 0})
