"""What every command does with messages, flags and its cache."""

import io
import pwd
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax
import pytest
from rich.console import Console
from rich.tree import Tree

from eagle_jax import files
from eagle_jax.cli.command import (
    Parser,
    run_command,
    run_script,
    say,
)
from eagle_jax.files import keep_compiled_programs
from eagle_jax.methods import find_method

_FOLDER = "jax_compilation_cache_dir"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a test change where compiled programs, and which trees paid, are kept."""
    monkeypatch.setattr(files, "_KEPT", [])
    names = (_FOLDER, "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(_FOLDER, None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as in a container."""

    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("cache", "homeless")
@pytest.mark.parametrize(
    ("variable", "folder"),
    [("XDG_CACHE_HOME", "eagle_jax"), ("HOME", ".cache/eagle_jax"), (None, None)],
)
def test_compiled_programs_are_kept_where_the_user_has_a_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    folder: str | None,
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path))
    keep_compiled_programs()
    kept = getattr(jax.config, _FOLDER)
    assert files.kept_folder() == (None if kept is None else Path(kept))
    assert kept == (None if folder is None else str(tmp_path / folder))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--number", "many"], "argument --number: invalid int value: 'many'"),
        (["--number=--"], "argument --number: '--' is no value"),
        (["--number", "1", "--other"], "unrecognized arguments: --other"),
        (["--number=2", "--nubmer"], "unrecognized arguments: --nubmer; did you mean"),
        ([], "the following arguments are required: --number"),
    ],
)
def test_flags_that_do_not_parse_are_refused_in_one_line(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> int:
        parser = Parser()
        parser.add_argument("--number", type=int, required=True)
        parser.parse_args(argv)
        return 0

    assert run_command(action) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {named}")
    assert len(err.splitlines()) == 1


def test_the_help_marks_what_is_required_and_what_holds_without_a_flag() -> None:
    parser = Parser("Does this.\n\n    with an example")
    parser.add_argument("--number", type=int, required=True, help="how many")
    parser.add_argument("--names", nargs="+", default=["a", "50%"], help="which")
    parser.add_argument("--none", type=Path, help="where")
    text = parser.format_help()
    for line in (
        "--number N [FLAGS]\n",
        "    with an example\n",
        "how many (required)\n",
        "which (default: a 50%)\n",
        "--none PATH           where\n",
    ):
        assert line in text, text


def test_a_path_may_begin_at_home_after_an_equals_sign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/root/of/all")
    parser = Parser()
    parser.add_argument_group("files").add_argument("--output", type=Path)
    assert parser.parse_args(["--output=~/x"]).output == Path("/root/of/all/x")


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


def test_warnings_are_lines_that_name_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        Parser().add_argument("--draft")
        assert run_command(lambda: find_method("lookup").check_draft("a/b") or 0) == 0
    warned = "method lookup drafts without weights: --draft a/b is not read"
    assert capsys.readouterr().err == f"warning: {warned}\n"


def test_a_missing_package_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def draw() -> NoReturn:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: run_command(draw))
    signal.signal(signal.SIGINT, before)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: No module named 'matplotlib'; ")
    assert "pip install '.[cli]' in the clone" in line
