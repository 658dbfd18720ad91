"""Whatever the files hold: they are read, or refused in one line.

`EAGLE_JAX_FUZZ` is the number of changed files per reader, `EAGLE_JAX_FUZZ_SEED` the
seed of the first.
"""

import gc
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle_jax.errors import InputError
from eagle_jax.training.checkpoint import LOG
from tests.conftest import load_main
from tests.fuzzing.mutations import changed_copy
from tests.fuzzing.subjects import Subject, make_subjects

CASES = int(os.environ.get("EAGLE_JAX_FUZZ", "25"))
FIRST_SEED = int(os.environ.get("EAGLE_JAX_FUZZ_SEED", "0"))
CPU_SECONDS, KIBIBYTES = 10, 4 * 2**20

NAMES = ["pair", "eagle3", "settings", "run", "records", "data"]
RUN = """
[data]
row_length = 16
held_out = 0.2
[run]
steps = 1
batch_size = 2
eval_rows = 2
eval_prompts = 1
eval_new_tokens = 2
[tree]
num_nodes = 3
depth = 1
width = 2
"""

pytestmark = [
    # Orbax leaves threads and coroutines when a restore fails.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # What commands say and go on after, as a missing rope_theta.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_opened: list[str] | None = None


class _HangError(BaseException):
    """Not an `Exception`: nothing may swallow it."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(arguments[0]))


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def subjects(
    chat_pair: Path, eagle3_pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Subject]:
    home = tmp_path_factory.mktemp("subjects")
    (home / "texts.txt").write_text("ten hats in the rain\n<|endoftext|>\n" * 30)
    (home / "config.toml").write_text(RUN)
    flags = ["--target", str(chat_pair / "target"), "--data", str(home / "texts.txt")]
    flags += ["--config", str(home / "config.toml")]
    train = load_main("train")
    assert train([*flags, "--output", str(home / "run")]) == 0
    run = Subject(
        source=home / "run",
        files=[LOG, "checkpoints/*/*/*", "checkpoints/**/*"],
        read=lambda run: train([*flags, "--output", str(run), "--resume"]),
    )
    tables = Path(__file__).parents[2] / "examples" / "embedded_pair"
    pairs = {"chat_pair": chat_pair, "eagle3_pair": eagle3_pair}
    return make_subjects(home, tables=tables, **pairs) | {"run": run}


@pytest.mark.parametrize(
    "name", [*NAMES, pytest.param("bins", marks=pytest.mark.torch)]
)
def test_changed_files_are_read_or_refused_in_one_line(
    subjects: dict[str, Subject],
    name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    subject = subjects[name]
    (tmp_path / "outside").mkdir()
    (secret,) = subjects["pair"].source.glob("head/*.safetensors")
    shutil.copyfile(secret, tmp_path / "outside" / "secret.safetensors")
    failures = []
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        folder = changed_copy(seed, subject.source, tmp_path, subject.files)
        problem = _problem(subject, folder) or _said(capfd.readouterr().err)
        if problem:
            failures.append(f"seed {seed}: {problem}")
        if seed % 50 == 49:
            jax.clear_caches()
    gc.collect()  # What Orbax left is found here, not in a test that expects nothing.
    assert not failures, "\n".join(failures)


def _problem(subject: Subject, folder: Path) -> str:
    """What is wrong with how a folder is read or refused; "" if nothing is."""
    global _opened

    def ring(*_: object) -> None:
        raise _HangError

    problem = ""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    _opened = []
    try:
        subject.read(folder)
    except (InputError, OSError) as error:
        if not str(error).isprintable() or len(str(error)) > 300:
            problem = f"unclear: {str(error)!r}"
    except (KeyboardInterrupt, pytest.exit.Exception):
        raise
    except BaseException:
        problem = traceback.format_exc(limit=-8)
    finally:
        opened, _opened = _opened, None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    for path in opened or []:
        if "/outside/" in path or "passwd" in path:
            problem = f"opened {path}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    return f"took {grown:,} KiB" if grown > KIBIBYTES else problem


def _said(err: str) -> str:
    """What is wrong with what a command tells on standard error; "" if nothing is."""
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    is_last = errors == err.splitlines()[-1:]
    return f"printed {err}" if "Traceback" in err or (errors and not is_last) else ""
