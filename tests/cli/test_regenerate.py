"""Regenerating texts from the command line: its files, its resumption, its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.cli.regenerate import main as run
from eagle_jax.training.conversations import read_examples
from eagle_jax.training.encode import encode_examples
from tests.chats import BOS, CHATS


def _command(pair: Path, output: Path, *more: Any) -> list[str]:
    known = ["--target", pair / "target", "--output", output, "--max-new-tokens", 6]
    settings = ["--dtype", "float32", "--temperature", 1, "--batch-size", 2]
    return [str(part) for part in [*known, *settings, *more]]


def _data(folder: Path) -> Path:
    path = folder / "chats.jsonl"
    records: list[dict[str, Any]] = [
        {"messages": [{"role": r, "content": c} for r, c in turns]} for turns in CHATS
    ]
    records += [{"text": "there is another one"}]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def _records(path: Path) -> list[dict[str, Any]]:
    head, *lines = path.read_text().splitlines()
    assert "run" in json.loads(head)
    return [json.loads(line) for line in lines]


def test_samples_are_the_same_with_a_head_in_other_batches_and_after_a_stop(
    chat_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole.jsonl"
    assert run(_command(chat_pair, whole, "--samples", 5)) == 0
    assert "5 texts | " in capsys.readouterr().out
    records = _records(whole)
    assert [record["index"] for record in records] == list(range(5))
    assert len({tuple(record["ids"]) for record in records}) == 5
    assert all(record["ids"][0] == BOS for record in records)

    drafted = tmp_path / "drafted.jsonl"
    head = ["--draft", chat_pair / "head", "--num-nodes", 6, "--depth", 2, "--width", 3]
    assert run(_command(chat_pair, drafted, *head, "--samples", 5)) == 0
    assert drafted.read_bytes() == whole.read_bytes()

    stopped = tmp_path / "stopped.jsonl"
    assert run(_command(chat_pair, stopped, "--samples", 2)) == 0
    with stopped.open("ab") as file:
        file.write(whole.read_bytes().splitlines()[3][:20])
    assert run(_command(chat_pair, stopped, "--samples", 5, "--batch-size", 3)) == 0
    assert "going on after the first 2 of 5" in capsys.readouterr().err
    assert stopped.read_bytes() == whole.read_bytes()
    assert run(_command(chat_pair, stopped, "--samples", 5)) == 0
    assert "| complete" in capsys.readouterr().out
    data = _command(chat_pair, stopped, "--data", _data(tmp_path))
    assert run(data) == 2 and "data was 'samples'" in capsys.readouterr().err


def test_conversations_and_texts_are_rewritten_and_can_be_trained_on(
    chat_pair: Path, tokenizer: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert run(_command(chat_pair, output, "--data", _data(tmp_path))) == 0
    records = _records(output)
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [m["content"] for m in records[1]["messages"] if m["role"] == "user"] == [
        "One"
    ]
    found = read_examples(output)
    assert not found.left_out
    encoded = encode_examples(found.examples, tokenizer, max_length=200)
    for record, sample in zip(records, encoded.samples, strict=True):
        assert sample.tokens.tolist() == record["ids"]
        assert sample.loss_mask.astype(int).tolist() == record["loss_mask"]


def test_conversations_need_room(
    chat_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--data", _data(tmp_path), "--min-prefix", 9, "--max-length", 4]
    assert run(_command(chat_pair, tmp_path / "out.jsonl", *more)) == 2
    assert "none of 4 prompts left room" in capsys.readouterr().err


def test_questions_are_the_same_after_a_stop(
    chat_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "questions.jsonl"
    command = _command(chat_pair, output, "--questions", 40)
    assert run([*command, "--max-new-tokens", "1"]) == 2
    assert "none of 40 was a question" in capsys.readouterr().err
    command += ["--max-new-tokens", "60", "--overwrite"]
    assert run(command) == 0
    whole = output.read_bytes()
    head, *lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join([head, *lines[:2]]))
    assert run(command[:-1]) == 0
    assert output.read_bytes() == whole
    # The last question had been asked before: it is left out.
    records = _records(output)
    assert len(records) > 3
    records[0]["messages"] = records[-1]["messages"]
    output.write_bytes(head + f"{json.dumps(records[0])}\n".encode())
    assert run(command[:-1]) == 0
    assert _records(output) == records[:-1]
    assert [m["role"] for m in records[1]["messages"]] == ["user"]
