"""Whatever the files hold: they are read, or refused in one line.

`EAGLE_JAX_FUZZ` is the number of changed files per reader, `EAGLE_JAX_FUZZ_SEED` the
seed of the first.
"""

import contextlib
import gc
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle_jax.errors import InputError
from tests.conftest import load_main
from tests.fuzzing.mutations import changed_copy
from tests.fuzzing.subjects import Subject, make_subjects

CASES = int(os.environ.get("EAGLE_JAX_FUZZ", "25"))
FIRST_SEED = int(os.environ.get("EAGLE_JAX_FUZZ_SEED", "0"))
# Of a processor's time and, for what waits, of the clock: machines may be busy.
CPU_SECONDS, WALL_SECONDS = 10, 120
BYTES = 4 * 2**30

NAMES = (
    *("pair", "shards", "eagle3", "store", "settings", "run", "records", "file"),
    *("data", pytest.param("bins", marks=pytest.mark.torch)),
)
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
calibrate = false
[tree]
num_nodes = 3
depth = 1
width = 2
"""

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    # Orbax leaves threads and coroutines when a restore fails.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # What commands say and go on after, as a missing rope_theta.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_watched: list[str] | None = None


class _HangError(BaseException):
    """Not an `Exception`: nothing may swallow it."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event == "open":
        _watched.append(str(arguments[0]))


@pytest.fixture(scope="module")
def subjects(
    chat_pair: Path,
    eagle3_pair: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Subject]:
    home = tmp_path_factory.mktemp("subjects")
    (home / "texts.txt").write_text("ten hats in the rain\n<|endoftext|>\n" * 30)
    (home / "config.toml").write_text(RUN)
    flags = [
        *("--target", str(chat_pair / "target"), "--data", str(home / "texts.txt")),
        *("--config", str(home / "config.toml")),
    ]
    train = load_main("train")
    assert train([*flags, "--output", str(home / "run")]) == 0
    return make_subjects(
        home,
        chat_pair=chat_pair,
        eagle3_pair=eagle3_pair,
        configs=Path(__file__).parents[2] / "examples" / "embedded_pair",
        run=home / "run",
        resume=lambda run: train([*flags, "--output", str(run), "--resume"]),
    )


@pytest.mark.parametrize("name", NAMES)
def test_changed_files_are_read_or_refused_in_one_line(
    subjects: dict[str, Subject],
    name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    subject = subjects[name]
    (tmp_path / "outside").mkdir()
    shutil.copyfile(
        next(subjects["pair"].source.glob("target/*.safetensors")),
        tmp_path / "outside" / "secret.safetensors",
    )
    failures = []
    counts = {"read": 0, "refused": 0}
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        folder = changed_copy(seed, subject.source, tmp_path, subject.files)
        outcome = _said(_outcome(subject, folder), capfd.readouterr().err)
        if outcome in counts:
            counts[outcome] += 1
        else:
            failures.append(f"seed {seed}: {outcome}")
        if seed % 50 == 49:
            jax.clear_caches()
    gc.collect()  # What Orbax left is found here, not in a test that expects nothing.
    with capfd.disabled():
        if "EAGLE_JAX_FUZZ" in os.environ:
            print(f"\n{name}: {counts} of {CASES}, {len(failures)} failures")
    assert not failures, "\n".join(failures)


def _outcome(subject: Subject, folder: Path) -> str:
    """Returns "read", "refused" or what else became of it."""
    global _watched
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _watched = []
    try:
        with _alarm():
            subject.read(folder)
        outcome = "read"
    except (InputError, OSError) as error:
        is_clear = str(error).isprintable() and len(str(error)) <= 300
        outcome = "refused" if is_clear else f"unclear: {str(error)!r}"
    except (KeyboardInterrupt, pytest.exit.Exception):
        raise
    except BaseException:
        outcome = traceback.format_exc(limit=-8)
    opened, _watched = _watched, None
    outside = [path for path in opened if "/outside/" in path or "passwd" in path]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if outside:
        return f"opened {outside[0]}"
    return f"took {grown:,} KiB" if grown * 1024 > BYTES else outcome


def _said(outcome: str, err: str) -> str:
    """Returns the outcome of a command that tells it on standard error."""
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    is_last = errors == err.splitlines()[-1:]
    if "Traceback" in err or (errors and not is_last):
        return f"printed {err}"
    return "refused" if errors else outcome


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Ends what takes too long."""

    def ring(*_: object) -> None:
        raise _HangError

    timers = {
        signal.ITIMER_PROF: (signal.SIGPROF, CPU_SECONDS),
        signal.ITIMER_REAL: (signal.SIGALRM, WALL_SECONDS),
    }
    before = {kind: signal.signal(kind, ring) for kind, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


sys.addaudithook(_watch)
