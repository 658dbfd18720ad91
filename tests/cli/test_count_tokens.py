"""Counting tokens from the command line: of texts, of records, of nothing."""

import argparse
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from eagle_jax.cli.settings import add_settings
from eagle_jax.config import GenerateConfig
from eagle_jax.generation.tokenizer import load_tokenizer
from eagle_jax.training.config import TrainConfig
from tests.checkpoints.folders import add_padding
from tests.conftest import Main, load_main
from tests.evaluation.synthetic import plain, write

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
    before = data.read_bytes()
    same = data.rename(tmp_path / "texts.json")
    assert count([*flags[:2], "--output", str(same), str(same)]) == 2
    assert "is read from it" in capsys.readouterr().err
    assert same.read_bytes() == before
    assert count(flags) == 0
    ids = json.loads(output.read_text())["ids"]
    assert len(ids) == 75 and ids[2:] == list(range(73))  # The tokenizer's order.


@pytest.mark.filterwarnings("default:.*<pad>:UserWarning")
def test_a_token_beyond_the_embedding_is_not_drafted(
    count: Main, tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    add_padding(target)
    output = tmp_path / "draft_vocabulary.json"
    assert count(["--target", str(target), "--output", str(output)]) == 0
    assert "warning: " in capsys.readouterr().err
    assert max(json.loads(output.read_text())["ids"]) == STOP


def test_the_answers_of_an_evaluation_are_counted(
    count: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "records" / "a.jsonl", tmp_path / "out.json"
    command = [str(file.parent), "--output", str(output)]

    def run(ids: list[int], vocab_size: int) -> int:
        sizes = {"new_tokens": [len(ids)], "vocab_size": vocab_size}
        write(file, [plain(1, token_ids=[ids], **sizes)])
        return count(command)

    assert run([5, 7, 7], 2048) == 0
    found = json.loads(output.read_text())
    kept = [one for one in found["ids"] if one in (5, 7, 8)]
    assert (kept, found["counted"]) == ([7, 5, 8], 3)
    assert run([5, 7, 7], 300) == run([5, 2048, 7], 2048) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "a target with 300 tokens, and this one has 2048" in errors[0]
    assert "holds 2048, not 0 to 2047" in errors[1] and len(errors) == 2


def test_a_file_of_another_tokenizer_is_refused_by_every_command(
    count: Main, tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    output, questions = tmp_path / "other.json", tmp_path / "questions.jsonl"
    assert count(["--target", str(other), "--output", str(output)]) == 0
    question = {"question_id": 1, "category": "a", "turns": ["ab"]}
    questions.write_text(json.dumps(question))
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "head")]
    asked = ["--questions", str(questions), "--output", str(tmp_path / "records")]
    evaluated = [*pair, *asked, "--methods", f"eagle2:draft_vocabulary={output}"]
    generated = [*pair, "--draft-vocabulary", str(output), "--prompt", "ab"]
    capsys.readouterr()
    assert load_main("generate")(generated) == load_main("evaluate")(evaluated) == 2
    refusals = capsys.readouterr().err.splitlines()
    wanted = f"error: {output} was counted with another tokenizer than the target's"
    assert [line.startswith(wanted) for line in refusals] == [True, True]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (GenerateConfig, ("draft_vocabulary", "max_length", "calibration", "choices")),
        (TrainConfig, ("alignment", "draft_heads", "feature_layers")),
    ],
)
def test_the_help_of_settings_says_only_what_can_be_typed(
    kind: type, names: tuple[str, ...]
) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, kind, *names)
    text = " ".join(parser.format_help().split())
    assert "by default" in text and "None" not in text
