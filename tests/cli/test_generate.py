"""The command line as its users see it."""

import importlib.metadata
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import __version__
from tests.conftest import Main

Generate = Callable[[list[str], Path], dict[str, Any]]


@pytest.fixture(scope="module")
def pair_flags(tiny_pair: Path) -> list[str]:
    tree = ["--num-nodes", "6", "--depth", "2", "--width", "3"]
    return [*folders(tiny_pair), *tree, "--max-new-tokens", "20"]


def folders(pair: Path) -> list[str]:
    return ["--target", str(pair / "target"), "--draft", str(pair / "head")]


def without_draft(flags: list[str]) -> list[str]:
    place = flags.index("--draft")
    return flags[:place] + flags[place + 2 :]


@pytest.fixture
def generate(main: Main) -> Generate:
    def run(flags: list[str], file: Path) -> dict[str, Any]:
        assert main([*flags, "--json", str(file)]) == 0
        return json.loads(file.read_text())

    return run


def test_the_json_has_exactly_the_documented_fields(
    generate: Generate, pair_flags: list[str], tmp_path: Path
) -> None:
    flags = [*pair_flags, "--prompt", "ten", "--prompt", "one", "--batch-size", "2"]
    result = generate([*flags, "--seed", "5", "--compare"], tmp_path / "out.json")
    fields = {"settings", "versions", "device", "target_bytes", "runs", "totals"}
    assert set(result) == fields
    assert [run["prompt"] for run in result["runs"]] == ["ten", "one"]
    for number, run in enumerate(result["runs"]):
        fields = "prompt prompt_ids generated_ids text stop_reason accept_lengths "
        fields += "rounds rounds_by_tree tokens_per_round seed finish_reason"
        assert set(run) == set(fields.split())
        assert run["seed"] == 5 + number
        assert run["rounds"] == len(run["accept_lengths"])
        assert len(run["generated_ids"]) <= 20
        emitted = sum(run["accept_lengths"]) + run["rounds"]
        assert emitted >= len(run["generated_ids"]) - 1
        decoded = len(run["generated_ids"]) - 1
        assert run["tokens_per_round"] == decoded / run["rounds"]
    totals, rounds = result["totals"], sum(run["rounds"] for run in result["runs"])
    fields = "tokens rounds rounds_by_tree tokens_per_round tokens_per_second speedup "
    fields += (
        "compile_seconds autoregressive_tokens_per_second speedup speedups identical"
    )
    assert set(totals) == set(fields.split())
    assert totals["identical"] is True
    assert totals["tokens"] == sum(len(run["generated_ids"]) for run in result["runs"])
    assert totals["rounds"] == rounds
    assert totals["tokens_per_round"] == (totals["tokens"] - 2) / rounds


def test_a_clone_that_is_not_installed_writes_its_results(
    generate: Generate,
    pair_flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.metadata.Distribution.from_name

    def without_own(name: str) -> importlib.metadata.Distribution:
        if name.startswith("eagle"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", without_own)
    versions = generate([*pair_flags, "--prompt", "ten"], tmp_path / "x")["versions"]
    assert versions["eagle-jax"] == __version__
    assert versions["jax"] == importlib.metadata.version("jax")


def test_every_way_of_running_gives_the_same_tokens(
    generate: Generate,
    pair_flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["ten", "one more", "no"]))
    flags = [*pair_flags, "--prompts", str(prompts), "--temperature", "0.8"]
    ways = {
        "whole": [],
        "batched": ["--batch-size", "2"],  # The last batch is filled up.
        "traced": ["--trace"],
        "streamed": ["--stream"],
        "drawn": ["--show-tree"],
        "page": ["--html", str(tmp_path / "page.html")],
        "plain": ["--method", "autoregressive"],
    }
    results = {}
    for name, extra in ways.items():
        given = without_draft(flags) if name == "plain" else flags
        results[name] = generate([*given, *extra], tmp_path / f"{name}.json")
        printed = capsys.readouterr().out
        for run in results[name]["runs"]:
            begin = run["prompt"] if name == "streamed" else ""
            assert begin + run["text"] in printed, name
        assert printed.splitlines()[-1].endswith("s compiling")
        assert ("✓" in printed) == (name == "drawn")
    wanted = [run["generated_ids"] for run in results["whole"]["runs"]]
    for name, result in results.items():
        assert [run["generated_ids"] for run in result["runs"]] == wanted, name
    for run in results["traced"]["runs"]:
        assert len(run["trees"]) == run["rounds"]
        for tree in run["trees"]:
            fields = "tokens parents depths log_values path next_token seconds"
            assert set(tree) == set(fields.split())
            assert tree["parents"][0] == -1
            assert tree["depths"][0] == tree["log_values"][0] == 0
            assert len(tree["tokens"]) <= 6
    assert (tmp_path / "page.html").read_text().count("<section>") == 3


def test_other_draws_are_not_compared(
    generate: Generate, pair_flags: list[str], tmp_path: Path
) -> None:
    flags = "--max-new-tokens 2 --compare --temperature 1 --acceptance rejection"
    result = generate([*pair_flags, *flags.split()], tmp_path / "out.json")
    assert result["totals"]["identical"] is None


def test_the_embedded_pair_draws_trees_that_branch_unless_told_otherwise(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = ["--show-tree", "--trace"]  # Before anything is loaded.
    shown = "drawing trees of num_nodes 26, depth 6, width 4"
    for flags, is_said in ([], True), (["--width", "1"], False):
        assert main([*refused, *flags]) == 2
        assert (shown in capsys.readouterr().err) == is_said


def test_ctrl_c_while_streaming_ends_with_the_summary_so_far(
    main: Main, pair_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(io.StringIO):
        is_left = False

        def write(self, text: str) -> int:
            if len(self.getvalue()) > len("ten") and not self.is_left:
                self.is_left = True
                raise KeyboardInterrupt
            return super().write(text)

    file, shown = tmp_path / "out.json", Watched()
    flags = ["--prompt", "ten", "--ignore-eos", "--stream", "--json", str(file)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", shown)
        assert main([*pair_flags, *flags]) == 130
    assert "tokens/s" in shown.getvalue().splitlines()[-1]
    (run,) = json.loads(file.read_text())["runs"]
    assert run["stop_reason"] == "interrupted"
    assert 0 < len(run["generated_ids"]) < 20


def test_what_was_decoded_is_kept_although_it_cannot_be_printed(
    main: Main,
    pair_flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    file = tmp_path / "out.json"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        assert main([*pair_flags, "--prompt", "ten", "--json", str(file)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    (run,) = json.loads(file.read_text())["runs"]
    assert len(run["generated_ids"]) == 20
