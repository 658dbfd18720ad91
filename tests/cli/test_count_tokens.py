"""Counting tokens from the command line: of texts, of records, of nothing."""

import json
from collections import Counter
from pathlib import Path

import pytest

from eagle_jax.generation.tokenizer import load_tokenizer
from tests.conftest import Main, load_main

BOS, STOP = 298, 299


@pytest.fixture(scope="module")
def count() -> Main:
    return load_main("count_tokens")


def test_the_tokens_of_texts_stand_in_the_order_of_their_counts(
    count: Main, tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, texts = tiny_pair / "target", ["bbb ccc", "ab"]
    data, output = tmp_path / "texts.jsonl", tmp_path / "draft_vocabulary.json"
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    flags = ["--target", str(target), "--output", str(output)]
    assert count([*flags, str(data), str(data), "--size", "4"]) == 0
    tokenizer = load_tokenizer(target, 300)
    # The first token of a text is never drafted, and stop tokens may end it.
    ids = [tokenizer(text).input_ids[1:] for text in texts]
    counts = Counter(one for text in ids for one in text)
    ranked = sorted(counts, key=lambda one: (-counts[one], one))
    found = json.loads(output.read_text())
    assert found["vocab_size"] == 300
    assert set(found["ids"][:2]) == {BOS, STOP}
    assert found["ids"][2:] == ranked[:2]
    assert "4 of 300 tokens" in capsys.readouterr().out
    assert count(flags) == 0
    ids = json.loads(output.read_text())["ids"]
    assert len(ids) == 75 and ids[2:] == list(range(73))  # The tokenizer's order.


def test_the_answers_of_an_evaluation_are_counted(
    count: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records"
    records.mkdir()
    turn = {"turns": ["x"], "token_ids": [[5, 5, 7]], "prompt_tokens": [1]}
    times = {"wall_time": [1.0], "decode_time": [1.0], "stop_reasons": ["max_tokens"]}
    settings = {"method": "autoregressive", "label": "x", "temperature": 0.0}
    line = {
        **{"question_id": 1, "category": "a", "question": "f", "model_id": "m"},
        "choices": [{"index": 0, **turn, **times, "accept_lengths": [1, 1]}],
        "run": settings | {"batch_size": 1, "vocab_size": 2048},
    }
    file, output = records / "a.jsonl", tmp_path / "out.json"
    file.write_text(json.dumps(line))
    assert count([str(records), "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    kept = [one for one in found["ids"] if one in (5, 7, 8)]
    assert (kept, found["counted"]) == ([5, 7, 8], 3)

    line["run"]["vocab_size"] = 300
    file.write_text(json.dumps(line))
    assert count([str(records), "--output", str(output)]) == 2
    line["run"]["vocab_size"] = 2048
    line["choices"][0]["token_ids"] = [[5, 2048, 7]]
    file.write_text(json.dumps(line))
    assert count([str(records), "--output", str(output)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "a target with 300 tokens, and this one has 2048" in errors[0]
    assert "holds token 2048" in errors[1] and len(errors) == 2
