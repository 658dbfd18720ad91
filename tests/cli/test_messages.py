"""What every command does with messages."""

import io
import sys

import pytest
from rich.console import Console
from rich.tree import Tree

from eagle_jax.cli.command import run_command, say


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, raw in written.items():
        stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, name, stream)

    def show() -> int:
        print("\N{CHECK MARK} \ud800")  # Half a character stands in no encoding.
        tree = Tree("\N{SNOWMAN}")
        tree.add("\N{CHECK MARK}")
        Console().print(tree)
        say("\N{CHECK MARK}")
        return 0

    assert run_command(show) == 0
    shown = {name: raw.getvalue().decode(encoding) for name, raw in written.items()}
    mark = "\N{CHECK MARK}" if encoding == "utf-8" else r"\u2713"
    assert shown["stdout"].splitlines()[0] == rf"{mark} \ud800"
    assert shown["stdout"].count(mark) == 2
    assert shown["stderr"] == f"{mark}\n"
