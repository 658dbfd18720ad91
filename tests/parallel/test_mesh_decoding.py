"""Decoding over eight devices gives the tokens of one.

Devices are fixed when a process starts, so all of it runs in another one.
"""

import subprocess
import sys
from pathlib import Path

from tests.devices import with_devices

_REPOSITORY = Path(__file__).resolve().parents[2]


def _run(module: str, *arguments: str, num_devices: int) -> list[str]:
    """Runs a module in a process of its own; returns what it says."""
    process = subprocess.run(
        [sys.executable, "-m", f"tests.parallel.{module}", *arguments],
        cwd=_REPOSITORY,
        env=with_devices(num_devices),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines.pop() == "done"
    return lines


def test_every_mesh_gives_the_tokens_of_one_device(
    tiny_pair: Path, tmp_path: Path
) -> None:
    folders = (str(tiny_pair), str(tmp_path))
    lines = _run("on_eight_devices", *folders, num_devices=8)
    assert [line for line in lines if line.startswith("equal")] == [
        *("equal 8 1 1", "equal 8 1 8", "equal 8 2 4", "equal 8 8 1"),
        "equal 2 1 8",
    ]


def test_experts_eagle3_heads_and_training_are_split_over_a_mesh() -> None:
    assert _run("on_four_devices", num_devices=4) == [
        "equal mixtral data=1,tensor=4",
        "equal eagle3 data=2,tensor=2",
        "no weight moves in training data=2,tensor=2",
    ]
