"""Ctrl-C ends a command in one line."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from eagle_jax.cli.command import run_command, run_script

REPOSITORY = Path(__file__).resolve().parents[2]


class EndedError(BaseException):
    """Instead of the end of the process."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs a script's `main`; returns the exit code of a process that just ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def end(code: int) -> NoReturn:
        raise EndedError(code)

    def run_it(main: Callable[[], int]) -> int:
        monkeypatch.setattr(os, "_exit", end)
        with pytest.raises(EndedError) as ended:
            run_script(main)
        return ended.value.args[0]

    yield run_it
    signal.signal(signal.SIGINT, before)


def wait() -> int:
    """Works until it is interrupted."""
    for _ in range(2000):
        time.sleep(0.005)
    return 0


def test_an_interrupted_command_ends_without_pythons_own_end(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """In which threads that still compile or save crash."""

    def action() -> int:
        print("so far", end="")
        signal.raise_signal(signal.SIGINT)
        return wait()

    assert run(lambda: run_command(action)) == 130
    assert capsys.readouterr() == ("so far", "interrupted\n")


def test_ctrl_c_outside_of_the_command_ends_in_one_line(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def parse() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert run(parse) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_jax_is_imported_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "generate.py")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_what_ignores_ctrl_c_goes_on(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a process in the background of a script does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def action() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    with pytest.raises(SystemExit) as ended:
        run_script(lambda: run_command(action))
    assert ended.value.code == 0
    assert capsys.readouterr().err == ""
