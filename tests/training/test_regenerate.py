from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle_jax.decoding.state import StopReason
from eagle_jax.engine.needs import BatchNeeds
from eagle_jax.engine.request import Request
from eagle_jax.engine.text import Text
from eagle_jax.logs import JsonLines
from eagle_jax.training.conversations import Example
from eagle_jax.training.regenerate import next_index
from eagle_jax.training.writer import Task, Writer, seed_of
from tests.chats import BOS, CHATS, EOS
from tests.helpers import refused

SEED = 3
CONVERSATIONS = [
    Example(
        where=f"line {number}",
        messages=tuple({"role": role, "content": content} for role, content in turns),
    )
    for number, turns in enumerate(CHATS, 1)
]


def writer_of(tokenizer: Any, **settings: Any) -> Writer:
    """What asks a pair that was not read."""

    def text(prompt: list[int], request: Request) -> Text:
        return Text(prompt, request, needs=BatchNeeds(), tokenizer=tokenizer)

    def request(seed: int) -> Request:
        return Request(seed=seed, temperature=1.0)

    pair: Any = SimpleNamespace(tokenizer=tokenizer, text=text, request=request)
    return Writer(**{"pair": pair, "seed": SEED, "max_length": 200} | settings)


def token_of(seed: int) -> int:
    return 65 + seed % 7


def written(
    tasks: Iterable[Task], *, stop: StopReason = StopReason.STOP_TOKEN
) -> tuple[list[Any], list[Text]]:
    """The records of texts whose answers are a token of their seed; the answers."""
    records, answers = [], []
    for task in tasks:
        try:
            answer = next(task)
            while True:
                answer.token_ids = [token_of(answer.request.seed), EOS]
                answer.stop_reason = stop
                answers.append(answer)
                answer = task.send(answer)
        except StopIteration as end:
            records.append(end.value)
    return records, answers


def answered(tokenizer: Any, **settings: Any) -> tuple[list[Any], list[Text]]:
    """The records of the conversations, and their answers."""
    stop = settings.pop("stop", StopReason.STOP_TOKEN)
    return written(
        writer_of(tokenizer, **settings).continued(CONVERSATIONS, (1, 64)), stop=stop
    )


def test_a_conversation_is_answered_turn_by_turn(tokenizer: Any) -> None:
    records, asked = answered(tokenizer)
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
    assert tokenizer.decode(asked[0].prompt_ids) == first


def test_the_ids_are_those_that_were_read_and_written(tokenizer: Any) -> None:
    records, asked = answered(tokenizer)
    last = asked[-1]
    assert last.request.seed == seed_of(SEED, 2, 2)
    assert records[2]["ids"] == [*last.prompt_ids, token_of(last.request.seed), EOS]
    for record in records:
        ids, mask = np.array(record["ids"]), np.array(record["loss_mask"])
        ends = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        answers = [m for m in record["messages"] if m["role"] == "assistant"]
        shown = [tokenizer.decode(ids[a:b].tolist()) for a, b in ends]
        earlier = [f"{answer['content']}</s>" for answer in answers[:-1]]
        assert shown[:-1] == earlier and len(shown) == len(answers)


def test_seeds_share_nothing_between_texts_turns_and_runs() -> None:
    seeds = {seed_of(s, i, t) for s in range(4) for i in range(20) for t in range(4)}
    assert len(seeds) == 4 * 20 * 4
    assert min(seeds) >= 0 and max(seeds) < 2**32


def test_a_conversation_ends_where_an_answer_is_cut_off_or_has_no_room(
    tokenizer: Any,
) -> None:
    def sizes(**settings: Any) -> list[int | None]:
        records, _ = answered(tokenizer, **settings)
        return [record and len(record["messages"]) for record in records]

    assert sizes(stop=StopReason.MAX_TOKENS) == [3, 2, 2]
    prompts = [len(text.prompt_ids) for text in answered(tokenizer)[1]]
    assert sizes(max_length=max(prompts)) == [5, 2, 4]
    assert sizes(max_length=min(prompts)) == [None, None, None]


def test_a_conversation_that_the_template_refuses_is_left_out(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No') }}"
    refusing += "{% endif %}" + tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    writer = writer_of(tokenizer)
    records, _ = written(writer.continued(CONVERSATIONS, (1, 64)))
    assert [record is None for record in records] == [True, False, False]
    assert writer.refused == ["line 1: the chat template refuses the conversation: No"]


def test_a_document_is_gone_on_with_after_a_random_prefix(tokenizer: Any) -> None:
    text = "there is another one that he likes"
    examples = [Example(where="", text=text)] * 60

    def gone_on(seed: int = SEED) -> list[Any]:
        return written(writer_of(tokenizer, seed=seed).continued(examples, (3, 6)))[0]

    records, ids = gone_on(), tokenizer(text).input_ids
    sizes = [record["loss_mask"].count(0) - 1 for record in records]
    assert set(sizes) == {3, 4, 5, 6}  # The start token is not counted.
    for size, record in zip(sizes, records, strict=True):
        assert record["ids"][: size + 1] == ids[: size + 1]
        assert record["loss_mask"] == [0] * (size + 1) + [1, 1]
        kept = tokenizer.decode(ids[1 : size + 1])
        assert record["text"].startswith(kept) and text.startswith(kept)
    assert gone_on() == records != gone_on(seed=4)


def test_short_documents_keep_what_they_have(tokenizer: Any) -> None:
    ids = np.array([BOS, 5], np.int32)
    examples = [Example(where="", text="he"), Example(where="", ids=ids)]
    _, asked = written(writer_of(tokenizer).continued(examples, (40, 50)))
    prompts = [text.prompt_ids for text in asked]
    assert prompts == [tokenizer("he").input_ids, [BOS, 5]]


def test_samples_begin_with_the_start_token(tokenizer: Any) -> None:
    records, _ = written(writer_of(tokenizer).samples(3))
    assert [record["ids"][0] for record in records] == [BOS] * 3
    assert [record["loss_mask"] for record in records] == [[0, 1, 1]] * 3
    startless = writer_of(SimpleNamespace(bos_token_id=None))
    refused(lambda: startless.samples(3), "needs a start token")


def test_a_file_is_gone_on_with_after_its_last_text(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with JsonLines(path, {"index": 3}) as lines:
        assert next_index(path) == 0
        for index in (0, 4):
            lines.append({"index": index, "text": "a" * 3_000_000})
            assert next_index(path) == index + 1
        lines.append({"text": "mine"})
    refused(lambda: next_index(path), f"{path}:4: index = None must be int")
