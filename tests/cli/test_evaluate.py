"""The evaluation command as its users see it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.cli.evaluate import main
from eagle_jax.engine.wording import load_tokenizer
from eagle_jax.evaluation.questions import encode
from eagle_jax.methods import WEIGHTS

Records = dict[str, list[dict[str, Any]]]
Evaluate = Callable[..., Records]

CATEGORIES = ["writing", "qa", "qa", "writing"]
# All prompts of a conversation lie in one bucket: a compilation serves them all.
TURNS = [
    ["what is ten to one in rain", "so"],
    ["a tenor is not a toaster"],
    ["the rain on the stone is hot"],
    ["there is no other one to see", "so"],
]
EAGLE2, LOOKUP = "eagle2:num_nodes=6,depth=2,width=2", "lookup:num_nodes=5,depth=2"
EAGLE2_ID = "eagle2-num_nodes=6-depth=2-width=2"
LOOKUP_ID = "lookup-num_nodes=5-depth=2"
NEW_TOKENS = 4


def write(path: Path, *questions: tuple[int, str, list[str]]) -> str:
    """Writes a file of questions: the id, the category and the turns of each."""
    names = ("question_id", "category", "turns")
    lines = [json.dumps(dict(zip(names, one, strict=True))) for one in questions]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="session")
def flags(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All flags but the methods and the output."""
    pair = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/head"]
    path = tmp_path_factory.mktemp("questions") / "mine.jsonl"
    questions = write(path, *zip(range(81, 85), CATEGORIES, TURNS, strict=True))
    return [*pair, "--questions", questions, "--max-new-tokens", str(NEW_TOKENS)]


def read(folder: Path) -> Records:
    """The records of each file, each with the settings of its run."""
    found: Records = {}
    for path in sorted(folder.glob("*.jsonl")):
        head, *lines = map(json.loads, path.read_text().splitlines())
        found[path.stem] = [head | line for line in lines]
    return found


@pytest.fixture(scope="session")
def evaluate(flags: list[str]) -> Evaluate:
    def run(folder: Path, methods: list[str], *extra: str) -> Records:
        given = [*flags, "--methods", *methods, "--output", str(folder), *extra]
        assert main(given) == 0
        return read(folder)

    return run


def texts(records: list[dict[str, Any]]) -> dict[int, list[list[int]]]:
    return {r["question_id"]: r["choices"][0]["token_ids"] for r in records}


def test_every_method_is_on_record_with_the_targets_own_text(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = evaluate(tmp_path, ["autoregressive", EAGLE2, LOOKUP], "--nodes")
    plain = runs["autoregressive-t0-b1"]
    names = ("autoregressive", EAGLE2_ID, LOOKUP_ID)
    assert set(runs) == {f"{name}-t0-b1" for name in names}
    for records in runs.values():
        assert texts(records) == texts(plain)
        for record in records:
            check_record(record)
    assert capsys.readouterr().out.count("0 of 4") == 2


def check_record(record: dict[str, Any]) -> None:
    """The fields agree with one another."""
    choice, run, nodes = record["choices"][0], record["run"], record["nodes"]
    number = record["question_id"] - 81
    assert record["category"] == CATEGORIES[number]
    assert len(choice["turns"]) == len(TURNS[number])
    assert max(choice["new_tokens"]) <= NEW_TOKENS
    steps = choice["accept_lengths"]
    assert sum(steps) >= sum(choice["new_tokens"]) - len(TURNS[number])
    assert min(choice["wall_time"]) > 0
    assert run["max_length"] == 256
    assert run["dtype"] == "float32"
    if run["method"] == "autoregressive":
        assert nodes is None
        assert set(steps) == {1}
        assert sum(steps) == sum(choice["new_tokens"]) - len(TURNS[number])
        assert run["num_nodes"] == 1
        return
    trees = nodes["trees"]
    assert {len(tree["parents"]) for tree in trees} <= {run["num_nodes"]}
    assert [len(tree["accepted"]) + 1 for tree in trees] == steps
    assert max(steps, default=1) <= run["depth"] + 1


def test_answers_are_fed_back_and_batches_change_neither_texts_nor_nodes(
    evaluate: Evaluate, tiny_pair: Path, tmp_path: Path
) -> None:
    # Long enough for rows to be finished at different rounds.
    flags = ["--nodes", "--max-new-tokens", "24", "--batch-sizes", "1", "3"]
    alone, batched = evaluate(tmp_path, [LOOKUP], *flags).values()
    assert texts(batched) == texts(alone)
    assert len({len(r["nodes"]["trees"]) for r in alone}) > 1
    nodes = [{r["question_id"]: r["nodes"] for r in way} for way in (alone, batched)]
    assert nodes[0] == nodes[1]
    tokenizer = load_tokenizer(tiny_pair / "target", 300)
    for record in alone:
        choice, turns = record["choices"][0], TURNS[record["question_id"] - 81]
        for number, length in enumerate(choice["prompt_tokens"], 1):
            answers = choice["turns"][: number - 1]
            prompt = encode(tokenizer, "none", turns[:number], answers)
            assert len(prompt) == length


def test_ctrl_c_loses_and_repeats_nothing(
    evaluate: Evaluate,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, calls = os.fsync, list[int]()

    def interrupted(handle: int) -> None:
        real(handle)
        calls.append(handle)
        if len(calls) == 2:  # After the settings and a record.
            raise KeyboardInterrupt

    given = [*flags, "--methods", "autoregressive", "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        assert main(given) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    path = tmp_path / "autoregressive-t0-b1.jsonl"
    written = path.read_bytes()
    assert written.count(b"\n") == 2, "the settings and a record"
    (resumed,) = evaluate(tmp_path, ["autoregressive"]).values()
    assert "1 of 4 questions are on record already" in capsys.readouterr().err
    (whole,) = evaluate(tmp_path / "whole", ["autoregressive"]).values()
    assert texts(resumed) == texts(whole)
    assert len(resumed) == 4
    before = path.read_bytes()
    assert before.startswith(written)
    evaluate(tmp_path, ["autoregressive"])
    assert path.read_bytes() == before, "nothing is left to be done"


def test_long_prompts_lose_their_beginning_and_keep_noise_of_their_own(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts that end alike are continued alike; a turn draws with its own seed.

    Asked alone, a question draws what it drew.
    """
    end = "1!2?3%4&5=6+7-8*"
    first, second = ([f"{start}{end}"] * 2 for start in "XZ")
    cut = write(tmp_path / "cut.jsonl", (0, "math", first), (1, "math", second))
    flags = ["--questions", cut, "--max-length", "16", "--temperatures", "0", "1"]
    runs = evaluate(tmp_path / "out", ["autoregressive"], *flags)
    greedy, sampled = runs.values()
    assert {n for r in greedy for n in r["choices"][0]["prompt_tokens"]} == {12}
    first, second = texts(greedy).values()
    assert first == second
    turns = [turn for record in texts(sampled).values() for turn in record]
    assert len({tuple(turn) for turn in turns}) == 4
    flags = [*flags[:-2], "1", "--per-category", "1"]
    (alone,) = evaluate(tmp_path / "one", ["autoregressive"], *flags).values()
    assert texts(alone) == {1: texts(sampled)[1]}
    lines = capsys.readouterr().err.splitlines()
    warned = [line for line in lines if "warning" in line]
    assert len(warned) == 3, "once per file"
    assert "4 prompts were longer than max_length - max_new_tokens = 12" in warned[0]


def test_runs_that_decode_alike_are_one_and_say_how_many_texts_are_others(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rejection draws other tokens of one distribution: they compare with nothing."""
    chain = "chain:depth=2"
    rules = ["coupled", "rejection"]
    methods = ["autoregressive", *(f"{chain},acceptance={rule}" for rule in rules)]
    runs = evaluate(tmp_path, methods, "--nodes", "--temperatures", "0", "1")
    found = {name: records[0]["run"]["acceptance"] for name, records in runs.items()}
    name = "chain-depth=2-acceptance"
    assert found == {
        "autoregressive-t0-b1": "greedy",
        f"{name}=coupled-t0-b1": "greedy",
        "autoregressive-t1-b1": "coupled",
        **{f"{name}={rule}-t1-b1": rule for rule in rules},
    }
    plain, coupled = runs["autoregressive-t1-b1"], runs[f"{name}=coupled-t1-b1"]
    drawn = runs[f"{name}=rejection-t1-b1"]
    assert texts(plain) == texts(coupled) != texts(runs["autoregressive-t0-b1"])
    assert texts(drawn) != texts(plain)
    for record in (*coupled, *drawn):
        check_record(record)
    shown = [line for line in capsys.readouterr().out.splitlines() if "-t1-b1" in line]
    _, like_plain, rejection = shown
    assert "0 of 4" in like_plain and " of " not in rejection


def test_every_kind_of_weights_has_a_flag(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for weights in WEIGHTS:
        assert f"--{weights.option.replace('_', '-')} FOLDER" in shown


def test_a_text_of_one_token_has_no_steps(evaluate: Evaluate, tmp_path: Path) -> None:
    prompts = tmp_path / "plain.txt"
    prompts.write_text("ten\n\nno\n")
    flags = ["--max-new-tokens", "1", "--nodes", "--questions", str(prompts)]
    (records,) = evaluate(tmp_path, [LOOKUP], *flags).values()
    assert [r["category"] for r in records] == ["plain"] * 2
    choice = records[0]["choices"][0]
    assert choice["accept_lengths"] == []
    assert choice["decoding_steps"] == [0] * len(choice["turns"])
    assert records[0]["nodes"]["trees"] == []


def test_a_tree_that_chooses_itself_is_evaluated_without_its_nodes(
    evaluate: Evaluate,
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["autoregressive", "lookup:tree=auto"]
    plain, auto = evaluate(tmp_path, methods).values()
    assert texts(auto) == texts(plain)
    assert auto[0]["run"]["tree"] == "auto" and "tree" not in plain[0]["run"]
    more = ["--methods", "lookup:tree=auto", "--nodes", "--output", f"{tmp_path}/other"]
    assert main([*flags, *more]) == 2
    assert "nodes are recorded of trees of one size" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
