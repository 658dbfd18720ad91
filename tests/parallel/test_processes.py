"""Two processes that decode as one."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from eagle_jax.parallel import detect_processes, join_processes
from tests.conftest import Main
from tests.devices import with_devices
from tests.helpers import refused

_REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def flags(tiny_pair: Path) -> list[str]:
    folders = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/head"]
    tree = ["--num-nodes", "6", "--depth", "2", "--width", "3"]
    prompts = ["--prompt", "the", "--prompt", "ten", "--prompt", "on"]
    limits = ["--max-new-tokens", "12", "--batch-size", "2", "--temperature", "0.8"]
    return [*folders, *tree, *prompts, *limits]


def test_two_processes_print_what_one_prints(
    main: Main,
    flags: list[str],
    port: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*flags, "--json", str(tmp_path / "alone.json")]) == 0
    alone = capsys.readouterr().out.splitlines()
    together = ["--mesh", "data=2,tensor=2", "--coordinator", f"127.0.0.1:{port}"]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "scripts/generate.py", *flags, *together),
                *("--num-processes", "2", "--process-id", str(number)),
                *("--json", str(tmp_path / f"{number}.json")),
            ],
            cwd=_REPOSITORY,
            env=with_devices(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 0)  # The first may start last.
    ]
    (silent, _), (printed, errors) = (p.communicate(timeout=300) for p in processes)
    assert [p.returncode for p in processes] == [0, 0], errors
    assert silent == ""
    assert printed.splitlines()[:-1] == alone[:-1]  # The last line has times.
    assert not (tmp_path / "1.json").exists()
    first, second = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "0")
    )
    assert first["runs"] == second["runs"]


@pytest.mark.parametrize(
    ("address", "count", "number", "named"),
    [
        ("localhost", 2, 0, "HOST:PORT"),
        ("localhost:1234", 2, 2, "must be 0 to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    address: str, count: int, number: int, named: str
) -> None:
    refused(lambda: join_processes(address, count, number), named)


def test_a_machine_without_a_cluster_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def initialize() -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    refused(detect_processes, "no cluster was found", "`coordinator`")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--coordinator", "localhost:1234"], "belong together"),
        (["--process-id", "0", "--num-processes", "2"], "belong together"),
        (["--all"], "need --mesh"),
        (["--distributed"], "need --mesh"),
        (["--distributed", "--process-id", "0"], "or --distributed alone"),
        (["--all", "--mesh", "tensor=2", "--stream"], "every round"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    main: Main,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    named: str,
) -> None:
    if extra[0] == "--all":
        start = ["--coordinator", "localhost:1234", "--num-processes", "2"]
        extra = [*start, "--process-id", "0", *extra[1:]]
    assert main([*flags, *extra]) == 2
    assert named in capsys.readouterr().err
