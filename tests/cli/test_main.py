"""`eagle-jax` and the names of its commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_jax.cli.command import Parser
from eagle_jax.cli.main import COMMANDS, run
from tests.conftest import load_main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]], ids=str)
def test_every_command_is_told_with_what_it_does(
    argv: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["eagle-jax", *argv])
    with pytest.raises(SystemExit) as ended:
        run()
    assert not ended.value.code
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert [name for name, _ in told] == list(COMMANDS)
    assert all(len(words) > 20 for _, words in told)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nonsense", ""),
        ("--nonsense", ""),
        ("generte", "; did you mean 'generate'?"),
    ],
)
def test_what_is_no_command_is_answered_with_what_is(
    name: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["eagle-jax", name])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert (
        line == f"error: {name!r} is no command; known are {', '.join(COMMANDS)}{hint}"
    )


@pytest.mark.parametrize("flag", [["--model", "a"], ["--model=a"]])
def test_a_flag_that_other_programs_have_points_to_ours(
    flag: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["eagle-jax", "serve", *flag])
    monkeypatch.setattr("eagle_jax.cli.main.keep_compiled_programs", lambda: None)
    monkeypatch.setattr("eagle_jax.cli.main.run_script", lambda main: sys.exit(main()))
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    assert "did you mean '--target'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_each_of_its_flags_and_tells_no_secret(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_JAX_API_KEY", "secret")
    with pytest.raises(SystemExit) as ended:
        load_main(name.replace("-", "_"))(["--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "secret" not in shown and "None" not in shown
    names = r"`([A-Z]|\w+_\w+|\w+\.(?!json`|md`)\w+)`"  # Of Python, not of files.
    assert not re.findall(names, shown)
    # Where a line of an example goes on, it ends in a backslash.
    assert not re.findall(r"^    eagle-jax .*\S {4,}(?!#)", shown, re.MULTILINE)
    assert Parser.latest is not None
    assert all(action.help for action in Parser.latest._actions)


def test_every_script_is_a_command() -> None:
    scripts = {path.stem: path.read_text() for path in REPOSITORY.glob("scripts/*.py")}
    assert {name.replace("-", "_") for name in COMMANDS} == set(scripts)
    assert all(f'main("{name}")' in text for name, text in scripts.items())


def test_a_command_runs_outside_of_the_clone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eagle_jax", "generate", "--target", "nonsense"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "--draft" in done.stderr
