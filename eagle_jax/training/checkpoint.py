"""The folder of a run: its log and its picture, and the checkpoints that are kept."""

import contextlib
import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from eagle_jax.checkpoints.hub import VOCABULARY_FILE
from eagle_jax.errors import InputError, first_line
from eagle_jax.files import is_left_behind, unfinished, write_whole, writing
from eagle_jax.logs import read_log
from eagle_jax.parsing import check_type, parse_json, resolved, value_at

LOG = "log.jsonl"
"""The name of the log in a run's folder, which a resumed run goes on with."""

FEATURES = "features.npy"
"""The file of a run's features, if they are kept."""

PLOT = "curve.png"
"""The picture of a run's log."""

_OURS = {LOG, FEATURES, PLOT, VOCABULARY_FILE, "checkpoints", "head"}


@contextlib.contextmanager
def writing_run(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a run's folder, which need not exist yet.

    A folder that was made for it and is empty when the block ends is removed.
    """
    if resolved(folder).exists() and not folder.is_dir():
        raise InputError(f"`output` {folder} is no folder; give another name")
    is_new = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished(folder / LOG):
            yield
    finally:
        with contextlib.suppress(OSError):
            if is_new:
                folder.rmdir()


def check_output(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuses an output folder before any long work starts."""
    if resume and overwrite:
        raise InputError("`resume` and `overwrite` exclude each other")
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    # What a kill left half-written has a hidden name.
    names = {name for name in names if not is_left_behind(name, _OURS)}
    if resume:
        if LOG not in names:
            raise InputError(f"`resume`: {output} holds no run; leave out `resume`")
        return
    if names and not overwrite:
        raise InputError(
            f"{output} is not empty; give `resume` to go on with its run, `overwrite` "
            "to replace it, or another name"
        )
    if names and (LOG not in names or names - _OURS):
        raise InputError(
            f"{output} is not replaced: it holds something else than a run "
            f"({', '.join(sorted(names - _OURS)[:3]) or f'no {LOG}'})"
        )


def remove_run(output: Path) -> None:
    """Removes a run, its log last: a killed removal leaves a run to overwrite."""
    ours = [path for path in output.glob("*") if path.name in _OURS]
    for path in sorted(ours, key=lambda path: path.name == LOG):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the whole rows of a log, see `loop.log_row`."""
    lines = itertools.islice(read_log(path), 1, None)
    rows = {where: parse_json(line, where) for where, line in lines}
    for where, row in rows.items():
        for name in ("step", "tokens"):
            check_type(int, value_at(row, name), f"{where}: {name}")
    return list(rows.values())


def plot_log(folder: Path, *, title: str) -> None:
    """Draws the log of a run: loss, agreement and tokens per round over steps."""
    from matplotlib.figure import Figure

    rows = read_rows(folder / LOG)
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    learnt = "training, with noise"
    panels = (
        ("loss", {"loss": learnt, "held_out_loss": "held out"}),
        ("agreement", {"agreement": learnt, "held_out_agreement": "held out"}),
        ("tokens per round", {"tokens_per_round": "held-out prompts"}),
    )
    axes = figure.subplots(1, len(panels))
    for axis, (label, curves) in zip(axes, panels, strict=True):
        for column, name in curves.items():
            points = [row for row in rows if column in row]
            steps = [row["step"] for row in points]
            axis.plot(steps, [row[column] for row in points], ".-", label=name)
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    write_whole(folder / PLOT, lambda part: figure.savefig(part, format="png"))


class Checkpoints:
    """The checkpoints of one run.

    Orbax writes each into a temporary folder and renames it, so a run that is killed
    at any moment leaves only whole ones.
    """

    def __init__(self, folder: Path, *, keep: int, best: str | None = None) -> None:
        """Opens or makes the folder.

        Args:
            folder: The folder of the checkpoints alone.
            keep: The number of newest checkpoints to keep.
            best: The metric by whose highest value one more is kept; `None` for none.
        """

        def measured(metrics: dict[str, Any]) -> float:
            # A checkpoint that another program wrote is never the best.
            value = metrics.get(best or "")
            return float(value) if isinstance(value, int | float) else -math.inf

        policies: list[Any] = [checkpoint_managers.LatestN(keep)]
        if best is not None:
            policies.append(checkpoint_managers.BestN(get_metric_fn=measured, n=1))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=measured if best else None,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
        )
        self._folder = folder
        with self._telling("read the checkpoints"):
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """Returns the newest checkpoint's step, `None` without any."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """Returns the best checkpoint's step, the newest where none was measured."""
        best = self._manager.best_step()
        return self.latest() if best is None else best

    def save(self, step: int, state: Any, metrics: dict[str, float]) -> None:
        """Writes a pytree of arrays, with metrics by which the best one is chosen."""
        with self._telling(f"write the checkpoint of step {step}"):
            self._manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics)
            self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """Reads a checkpoint that was kept, with the shapes and shardings of `like`."""
        with self._telling(f"read the checkpoint of step {step}"):
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Turns errors, of which Orbax and tensorstore have many kinds, into a line."""
        try:
            yield
        except Exception as error:
            raise InputError(
                f"cannot {what} in {self._folder}: {first_line(error)}"
            ) from error

    def close(self) -> None:
        """Waits until every checkpoint is written."""
        self._manager.close()
