"""Training a head from a target's folder and data files to a head's folder."""

import contextlib
import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax import checkpoints
from eagle_jax.checkpoints.export_files import copy_beside
from eagle_jax.checkpoints.hub import VOCABULARY_FILE
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.open import open_pair
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart, write_json, writing
from eagle_jax.heads.rows import compared_tokens, known_tokens
from eagle_jax.logs import JsonLines, check_log
from eagle_jax.models.devices import on_cpu
from eagle_jax.models.transformer import Transformer
from eagle_jax.parallel import MeshShape, PairSharding, shard_pair, wait_for_all
from eagle_jax.reporting import Progress, Report, say_nothing, show_nothing
from eagle_jax.training.checkpoint import LOG, check_output, plot_log, remove_run
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.conversations import fingerprint
from eagle_jax.training.data import read_data
from eagle_jax.training.head import open_beginning, write_head
from eagle_jax.training.loop import DivergedError, Run, Trained
from eagle_jax.training.packing import rows_at
from eagle_jax.training.step import StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What a run reads, and where it writes.

    Attributes:
        target: A Hugging Face folder or hub name.
        data: The files to train on, see `read_examples`.
        output: The run's folder, see `check_output`.
        held_out_data: The files to evaluate on instead of a share of the data.
        begin_with: A folder or hub name of a head of the same kind whose weights are
            trained further, and whose sizes are kept; `None` for new ones.
        mesh: The shape of the mesh; `None` for all devices, which share the rows of a
            step. A run that goes on on another mesh rounds sums differently.
        resume: Whether to go on with the run in `output`, bit for bit.
        overwrite: Whether to replace the run in `output`.
    """

    target: str
    data: Sequence[Path]
    output: Path
    held_out_data: Sequence[Path] = ()
    begin_with: str | None = None
    mesh: MeshShape | None = None
    resume: bool = False
    overwrite: bool = False


def train_head(
    job: TrainJob,
    config: TrainConfig,
    *,
    report: Report = say_nothing,
    progress: Progress = show_nothing,
) -> Trained:
    """Trains a head, evaluates it as it goes, and exports the best.

    Args:
        job: What the run reads, and where it writes.
        config: All settings of the run.
        report: Called with lines for a log.
        progress: Called to show how far work is.

    Raises:
        InputError: If settings, data and target do not fit together or are too large
            for this machine, or training diverges.
    """
    importlib.import_module("matplotlib")  # What the curve needs is missed at once.
    check_output(job.output, resume=job.resume, overwrite=job.overwrite)
    dtype = config.run.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu() else "bfloat16"
    run = dataclasses.replace(config.run, dtype=dtype)
    config = dataclasses.replace(config, run=run)
    folder = checkpoints.resolve(job.target)
    source = open_pair(job.target, None, PairConfig(tree=config.tree, dtype=dtype))
    begun_folder = checkpoints.resolve(job.begin_with) if job.begin_with else None
    head, read = open_beginning(begun_folder, source, config)
    most, row_length = source.sizes.max_positions, config.data.row_length
    checkpoints.check_max_length(most, row_length, "row_length")
    mesh = job.mesh or MeshShape(data=jax.device_count())
    sharding = shard_pair(mesh, source.sizes, batch_size=config.run.batch_size)
    layer = getattr(head.config, "layer", None) or source.sizes.layer
    sharding = sharding.with_drafter(layer, shapes_of(head.init))
    folders = {"target": folder, "begin_with": begun_folder}
    check_apart(job.output, *filter(None, folders.values()))
    identity: dict[str, Any] = {
        **{name: place and f"{place.resolve()}" for name, place in folders.items()},
        "data": [fingerprint(path) for path in job.data],
        "held_out_data": [fingerprint(path) for path in job.held_out_data],
        "settings": dataclasses.asdict(config),
    }
    if job.resume:
        check_log(job.output / LOG, identity)
    report("reading the data")
    files = job.data, job.held_out_data
    data = read_data(*files, source, config, report=report, progress=progress)
    rows_at(len(data.rows), 0, config.run.batch_size, seed=0)  # Refuses large batches.
    # These refuse rows that have no labels.
    known_tokens(data.rows, head.config)
    compared = compared_tokens(data.rows, head.config, config.loss)
    report(f"loading {job.target}")
    placed = dataclasses.replace(source, placement=sharding).load()
    target_params = placed.params.target
    first = read(target_params, sharding)
    _claim(job, identity, compared)
    target = Transformer(config=head.with_features(source.sizes), dtype=source.dtype)
    trained = Trained(
        target=folder,
        head=job.output / "head",
        config=config,
        identity=identity,
        step_config=StepConfig.of(config, target, head),
        target_params=target_params,
        data=data,
        summary="no evaluation was made",
        first=first,
    )
    return _run(trained, sharding, report, progress)


def _claim(
    job: TrainJob, identity: dict[str, Any], compared: np.ndarray | None
) -> None:
    """Begins this run's log, after all processes have checked the folder.

    The tokens that its steps compare, if not all, are those that the head will draft.
    """
    wait_for_all("all have looked at the output")
    if jax.process_index() == 0:
        if job.overwrite:
            remove_run(job.output)
        with writing(job.output):
            job.output.mkdir(parents=True, exist_ok=True)
        JsonLines(job.output / LOG, identity).close()
        if compared is not None:
            write_json(job.output / VOCABULARY_FILE, compared.tolist())
    wait_for_all("the output is there")


def _run(
    trained: Trained, sharding: PairSharding, report: Report, progress: Progress
) -> Trained:
    """Trains and exports the best head."""
    config, output = trained.config, trained.head.parent
    has_table = getattr(config.head, "include_embedding", False)
    table = trained.target_params.embedding if has_table else None
    is_first = jax.process_index() == 0
    run = Run(trained, sharding, progress)
    was_finished = run.first_step == config.run.steps
    summary = "finished before" if was_finished else trained.summary

    with (
        contextlib.closing(run),
        progress("step", config.run.steps, run.first_step, pause=0) as update,
    ):
        if run.first_step:
            report(f"going on after step {run.first_step}")
        diverged = None
        try:
            for row, evaluation in run.train():
                update(
                    row["step"],
                    f"loss {row['loss']:.4f} | agreement {row['agreement']:.3f} | "
                    f"{row['tokens_per_second']:,.0f} tokens/s",
                )
                if evaluation is not None:
                    summary = f"step {row['step']} | {evaluation.summary()}"
                    report(f"  held out | {summary}")
                    if is_first:
                        plot_log(output, title=f"a head for {trained.target.name}")
        except DivergedError as error:
            diverged = error
        best = run.best()
        if best is not None:
            fetched, embedding = sharding.fetch((best, table))
            # A head that was finished before has got a calibration since.
            if is_first and not (was_finished and trained.head.is_dir()):
                how = checkpoints.Export(
                    base_model=str(trained.target),
                    overwrite=True,
                    also=copy_beside(output),
                )
                head = trained.step_config.head
                write_head(trained.head, head, fetched, embedding, how)
        if diverged is not None:
            if best is None:
                raise diverged
            raise InputError(
                f"{diverged}; {trained.head.name}/ holds the best so far"
            ) from diverged
    return dataclasses.replace(trained, summary=summary)
