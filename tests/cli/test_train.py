"""Training a head from the command line: its files, its resumption, its refusals."""

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from eagle_jax.checkpoints.draft_files import load_calibration
from eagle_jax.cli.export import main as export
from eagle_jax.cli.train import main as train
from eagle_jax.drafting.calibration import Confidence
from eagle_jax.evaluation import fit
from eagle_jax.training.checkpoint import LOG, read_rows
from eagle_jax.training.loop import Run
from tests.devices import with_devices
from tests.helpers import file_bytes

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "train.py"
CONFIG = """
[data]
row_length = 32
held_out = 0.2

[optimizer]
learning_rate = 1e-2
warmup_steps = 2

[run]
steps = 12
batch_size = 8
log_every = 1
eval_every = 4
eval_rows = 8
eval_prompts = 2
eval_new_tokens = 8

[tree]
num_nodes = 5
depth = 2
width = 2
"""


@pytest.fixture(scope="module")
def flags(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("training")
    (folder / "config.toml").write_text(CONFIG)
    words = random.Random(0)
    texts = [
        " ".join(words.choices(["ten", "hats", "in", "the", "rain"], k=20))
        for _ in range(60)
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text(lines)
    return [
        f"--target={tiny_pair}/target",
        f"--data={folder}/texts.jsonl",
        f"--config={folder}/config.toml",
    ]


@pytest.fixture(scope="module")
def run(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    output = tmp_path_factory.mktemp("runs") / "run"
    assert train([*flags, "--output", str(output)]) == 0
    return output


def head_of(run: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(run / "head" / "model.safetensors")


def assert_same_state(one: Path, other: Path) -> None:
    """Compares parameters, moments and step of the last checkpoints."""
    states = []
    for run in (one, other):
        with ocp.PyTreeCheckpointer() as checkpointer:
            states.append(checkpointer.restore(run / "checkpoints" / "12" / "default"))
    chex.assert_trees_all_equal(*states)


def test_a_run_leaves_a_log_a_plot_checkpoints_and_a_head(run: Path) -> None:
    rows = read_rows(run / LOG)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8, 12]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert 1 <= rows[-1]["tokens_per_round"] <= 3
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (run / "head").iterdir()} >= {
        "config.json",
        "model.safetensors",
    }
    steps = {int(path.name) for path in (run / "checkpoints").iterdir()}
    assert {8, 12} <= steps


def test_any_checkpoint_of_a_run_becomes_a_head(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for path in (run / "checkpoints").iterdir():
        output = tmp_path / path.name
        assert export(["--checkpoint", str(path), "--output", str(output)]) == 0
        found[path.name] = file_bytes(output)
    assert len({head["model.safetensors"] for head in found.values()}) == len(found)
    assert file_bytes(run / "head") in found.values()
    nothing = str(run / "head")
    assert export(["--checkpoint", nothing, "--output", str(tmp_path / "new")]) == 2
    assert f"{nothing} is no checkpoint" in capsys.readouterr().err


def start(flags: list[str], output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *flags, "--output", str(output)]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=with_devices(1)
    )


def kill(process: subprocess.Popen[str], output: Path, step: int) -> None:
    """Kills a run while it writes the checkpoint that follows a step."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"step {step} of"):
            break
    while process.poll() is None:
        if any((output / "checkpoints").glob("*tmp*")):
            break
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_killed_run_resumes_bit_for_bit(
    flags: list[str], run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "killed"
    # Checkpoints follow steps 3 and 7, and each takes a while.
    kill(start(flags, output), output, 7)
    assert train([*flags, "--output", str(output), "--resume"]) == 0
    assert file_bytes(output / "head") == file_bytes(run / "head")
    assert_same_state(run, output)
    names = ("step", "tokens", "loss", "agreement", "held_out_loss")
    uninterrupted, resumed = (
        [[row.get(name) for name in names] for row in read_rows(folder / LOG)]
        for folder in (run, output)
    )
    assert resumed == uninterrupted


def assert_like(run: Path, other: Path) -> None:
    """Compares heads and logged losses up to the order of sums."""
    for name, tensor in head_of(run).items():
        np.testing.assert_allclose(head_of(other)[name], tensor, rtol=0, atol=2e-4)
    losses = [[row["loss"] for row in read_rows(x / LOG)] for x in (run, other)]
    np.testing.assert_allclose(*losses, rtol=2e-4)


def test_two_processes_go_on_with_what_one_began(
    flags: list[str], run: Path, tmp_path: Path, port: int
) -> None:
    output = tmp_path / "two"
    shutil.copytree(run, output)
    shutil.rmtree(output / "checkpoints" / "12")
    shutil.rmtree(output / "head")
    # Features that are read from the folder are those that a step would compute.
    log = (output / LOG).read_text()
    caches = '"cache_features": '
    (output / LOG).write_text(log.replace(f"{caches}false", f"{caches}true", 1))
    command = [*flags, "--mesh", "tensor=2", "--resume"]
    command += ["--output", str(output), "--cache-features"]
    # As SLURM tells of them.
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1"}
    slurm |= {"SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *command, "--distributed"],
            cwd=REPOSITORY,
            env=with_devices(1)
            | slurm
            | {"SLURM_PROCID": number, "SLURM_LOCALID": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    (printed, errors), (silent, others) = (p.communicate() for p in processes)
    assert [process.returncode for process in processes] == [0, 0], errors + others
    assert "going on after step 8" in errors and "step 12 of 12" in errors
    assert "step" not in others and silent == ""
    assert printed.startswith(f"{output / 'head'} | step 12")
    assert (output / "features.npy").is_file()
    assert_like(run, output)


@pytest.mark.parametrize(("at", "last"), [(0, None), (6, 4)])
def test_divergence_names_the_step_and_the_last_good_checkpoint(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    last: int | None,
) -> None:
    output = tmp_path / "diverges"
    one_step = Run._one_step

    def poisoned(self: Run, step: int) -> object:
        state, metrics, count = one_step(self, step)
        if step == at:  # Counted from 0.
            broken = jax.tree.map(lambda x: x * float("nan"), state.params)
            state = dataclasses.replace(state, params=broken)
        return state, metrics, count

    monkeypatch.setattr(Run, "_one_step", poisoned)
    assert train([*flags, "--output", str(output)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"the loss of step {at + 2} is no finite number: training has diverged" in line
    )
    kept = sorted(path.name for path in (output / "checkpoints").iterdir())
    if last is None:
        assert "no checkpoint was written" in line and not kept
        return
    assert f"the last good checkpoint is {output}/checkpoints/{last};" in line
    assert kept == [str(last)]
    assert "head/ holds the best so far" in line
    assert all(np.isfinite(tensor).all() for tensor in head_of(output).values())


def test_a_block_head_ships_with_its_calibration(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_each = {kind: (Confidence(),) for kind in fit.CONFIDENCES}
    monkeypatch.setattr(fit, "CONFIDENCES", one_each)
    sizes = "--block-size=3 --num-layers=1 --markov-rank=4 --feature-layers=0"
    steps = "--kind=dspark --steps=2 --eval-every=2"
    output = tmp_path / "run"
    assert train([*flags, *sizes.split(), *steps.split(), f"--output={output}"]) == 0
    path = output / "head" / "calibration.json"
    vocab_size = json.loads((output / "head" / "config.json").read_text())["vocab_size"]
    for kind in ("greedy", "sampled"):
        load_calibration(path, vocab_size=vocab_size, depth=3, kind=kind)
