"""The folder of a run, and its checkpoints: whole, the newest and the best kept."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from eagle_jax.errors import InputError, first_line
from eagle_jax.files import only_writer, writing

LOCK = ".lock"
"""In the folder of a run that is being written."""


@contextlib.contextmanager
def writing_run(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a run's folder, which is made if it is missing.

    If the block ends with nothing in the folders that were made for it, they go too.

    Args:
        folder: Of the run.

    Raises:
        InputError: If another process writes the run, or the folder cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder} is no folder; give another name")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with contextlib.ExitStack() as stack:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(only_writer(folder, folder / LOCK))
            yield
    finally:
        with contextlib.suppress(OSError):
            for place in made:
                place.rmdir()


class Checkpoints:
    """The checkpoints of one run.

    Orbax writes each into a temporary folder and renames it, so a run that is killed
    at any moment leaves only whole ones.
    """

    def __init__(self, folder: Path, *, keep: int, best: str | None = None) -> None:
        """Opens or makes the folder.

        Args:
            folder: Of the checkpoints alone.
            keep: Newest ones to keep.
            best: Also keep the one with the highest value of this metric.

        Raises:
            InputError: If what is there is broken.
        """

        def measured(metrics: dict[str, Any]) -> float:
            # What another program wrote there is never the best.
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
        try:
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        except Exception as error:  # Orbax has many kinds.
            raise InputError(
                f"cannot read the checkpoints in {folder}: {first_line(error)}"
            ) from error

    def latest(self) -> int | None:
        """Returns the newest checkpoint's step, `None` without any."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """Returns the best checkpoint's step, the newest where none was measured."""
        best = self._manager.best_step()
        return self.latest() if best is None else best

    def save(self, step: int, state: Any, metrics: dict[str, float]) -> None:
        """Writes a checkpoint.

        Args:
            step: Steps done.
            state: Pytree of arrays.
            metrics: By which the best is chosen.

        Raises:
            InputError: If the disk does not take it.
        """
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot write the checkpoint of step {step} to "
                f"{self._manager.directory}: {first_line(error)}"
            ) from error

    def restore(self, step: int, like: Any) -> Any:
        """Reads a checkpoint.

        Args:
            step: One of those kept.
            like: Pytree of arrays or shapes with the wanted shardings.

        Raises:
            InputError: If it cannot be read or is of other shapes.
        """
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except Exception as error:  # Orbax and tensorstore have many kinds.
            raise InputError(
                f"cannot read the checkpoint of step {step} in "
                f"{self._manager.directory}: {first_line(error)}"
            ) from error

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()
