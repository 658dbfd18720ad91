"""Training a head from a target's folder and data files to a head's folder."""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from eagle_jax import checkpoints
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.config import DecodingConfig, Dtype
from eagle_jax.drafting.heads import init_heads
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart, fingerprint_file, write_json, writing
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.devices import on_cpu
from eagle_jax.generation.memory import check_training
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.models.eagle3_head import Eagle3HeadConfig
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.hydra_heads import HydraConfig
from eagle_jax.models.transformer import Transformer
from eagle_jax.parallel import MeshShape, PairSharding, shard_pair, wait_for_all
from eagle_jax.parsing import check_type, read_json_if_any
from eagle_jax.progress import Progress, Report, say_nothing, show_nothing
from eagle_jax.training.begin import open_beginning
from eagle_jax.training.checkpoint import check_output, check_settings, remove_run
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import TrainingData, read_data
from eagle_jax.training.features import FeatureStore, write_features
from eagle_jax.training.heads import (
    TrainedHead,
    check_kind,
    count_vocabulary,
    new_head,
    tie_blocks,
    trained_target,
)
from eagle_jax.training.log import plot_log
from eagle_jax.training.loop import DivergedError, LogRow, Run, check_rows
from eagle_jax.training.step import StepConfig, read_target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A run, which is finished when `train_head` returns it.

    Attributes:
        target: The target's folder.
        head: The folder of the best head, in the official format.
        config: All settings of the run.
        step_config: The static settings of a step.
        pair: The target as it was loaded.
        data: The data that was read.
        summary: The last evaluation in one line, or why there is none.
        first: The weights that the run began with, float32; `None` for new ones.
    """

    target: Path
    head: Path
    config: TrainConfig
    step_config: StepConfig
    pair: LoadedPair
    data: TrainingData
    summary: str
    first: Any = None


def train_head(
    target: str,
    data: Sequence[Path],
    output: Path,
    config: TrainConfig,
    *,
    held_out_data: Sequence[Path] = (),
    begin_with: str | None = None,
    mesh: MeshShape | None = None,
    resume: bool = False,
    overwrite: bool = False,
    report: Report = say_nothing,
    progress: Progress = show_nothing,
) -> Trained:
    """Trains a head, evaluates it as it goes, and exports the best.

    Args:
        target: A Hugging Face folder or hub name.
        data: The files to train on, see `read_data`.
        output: The run's folder, see `check_output`.
        config: All settings of the run.
        held_out_data: The files to evaluate on instead of a share of the data.
        begin_with: A folder or hub name of a head of the same kind whose weights are
            trained further, and whose sizes are kept; `None` for new ones.
        mesh: The shape of the mesh; by default all devices share the rows of a step.
        resume: Whether to go on with the run in `output`, bit for bit.
        overwrite: Whether to replace the run in `output`.
        report: Called with lines for a log.
        progress: Called to show how far work is.

    Raises:
        InputError: If settings, data and target do not fit together or are too large
            for this machine, or training diverges.
    """
    check_kind(config)
    check_output(output, resume=resume, overwrite=overwrite)
    folder = checkpoints.resolve(target)
    before = read_json_if_any(output / "run.json") if resume else None
    source = open_pair(
        target,
        None,
        GenerateConfig(
            tree=config.tree, decoding=DecodingConfig(dtype=_dtype(config, before))
        ),
    )
    mesh = mesh or MeshShape(data=jax.device_count())
    begun_folder = checkpoints.resolve(begin_with) if begin_with else None
    begun = open_beginning(begun_folder, source, config) if begun_folder else None
    head = begun.sizes if begun else new_head(source.config, config)
    sharding = _shard(source, config, mesh, head)
    check_apart(output, *(x for x in (folder, begun_folder) if x is not None))
    identity = {
        **_identity(folder, begun_folder, data, held_out_data),
        "mesh": str(mesh),
        "settings": dataclasses.asdict(config),
        "dtype": source.dtype,
    }
    if resume:
        _check_same_run(output, before, identity, config, report)
    report("reading the data")
    reading = functools.partial(read_data, report=report, progress=progress)
    read = _read(reading, (data, held_out_data), source, config, head)
    step_config = _step_config(source, head, config)
    report(f"loading {target}")
    pair = source.load(sharding)
    first = begun.read(pair.params.target, sharding) if begun else None
    _claim(output, identity, overwrite=overwrite)
    trained = Trained(
        target=folder,
        head=output / "head",
        config=config,
        step_config=step_config,
        pair=pair,
        data=read,
        summary="no evaluation was made",
        first=first,
    )
    return _run(trained, sharding, report, progress)


def _read(
    reading: Callable[..., TrainingData],
    files: tuple[Sequence[Path], Sequence[Path]],
    source: PairSource,
    config: TrainConfig,
    head: TrainedHead,
) -> TrainingData:
    """Returns what is read from files, or refuses rows that cannot be trained on."""
    assert source.folder is not None, "targets are trained for from their files"
    stop_tokens = checkpoints.stop_tokens(source.folder)
    target = source.config
    read = reading(*files, source.tokenizer, target, config, stop_tokens=stop_tokens)
    check_rows(read.rows, config.run.batch_size)
    count_vocabulary(read.rows, head)  # Refuses rows that it cannot be counted in.
    return read


def _step_config(
    source: PairSource, head: TrainedHead, config: TrainConfig
) -> StepConfig:
    target_config = trained_target(source.config, head)
    return StepConfig(
        target=Transformer(config=target_config, dtype=source.dtype),
        head=head,
        loss=config.loss,
        optimizer=config.optimizer,
        steps=config.run.steps,
        dtype=source.dtype,
    )


def _claim(output: Path, identity: dict[str, Any], *, overwrite: bool) -> None:
    """Records this run in its folder, after all processes have checked the folder."""
    wait_for_all("all have looked at the output")
    if jax.process_index() == 0:
        if overwrite:
            remove_run(output)
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
        write_json(output / "run.json", identity)
    wait_for_all("the output is there")


def _dtype(config: TrainConfig, before: dict[str, Any] | None) -> Dtype:
    """Returns the type of a step's arithmetic: that of the run that goes on."""
    if config.run.dtype != "auto":
        return config.run.dtype
    recorded = (before or {}).get("dtype", "float32" if on_cpu() else "bfloat16")
    return check_type(Literal["float32", "bfloat16"], recorded, "run.json: dtype")


def _shard(
    source: PairSource, config: TrainConfig, mesh: MeshShape, head: TrainedHead
) -> PairSharding:
    """Returns all shardings, or refuses what memory cannot hold."""
    batch_size, row_length = config.run.batch_size, config.data.row_length
    if row_length > source.config.max_positions:
        raise InputError(
            f"row_length = {row_length} is more than the target's "
            f"{source.config.max_positions} positions (max_position_embeddings)"
        )
    check_training(
        source.config, source.dtype, batch_size=batch_size, row_length=row_length
    )
    sharding = shard_pair(mesh, source.config, batch_size=batch_size)
    layer = getattr(head, "layer", None) or source.config.layer
    return sharding.with_drafter(layer, shapes_of(init_heads, head))


def _identity(
    folder: Path,
    begun_folder: Path | None,
    data: Sequence[Path],
    held_out_data: Sequence[Path],
) -> dict[str, Any]:
    """Returns the files that a resumed run must share with the run it resumes."""
    for path in (*data, *held_out_data):
        if not path.is_file():
            raise InputError(f"cannot read the data {path}: it is no file")
    identity: dict[str, Any] = {
        "target": str(folder.resolve()),
        "data": [fingerprint_file(path) for path in data],
        "held_out_data": [fingerprint_file(path) for path in held_out_data],
    }
    if begun_folder is not None:
        identity["begin_with"] = str(begun_folder.resolve())
    return identity


def _check_same_run(
    output: Path,
    before: dict[str, Any] | None,
    identity: dict[str, Any],
    config: TrainConfig,
    report: Report,
) -> None:
    """Refuses to go on with other settings, data or another target."""
    if before is None:
        raise InputError(f"{output / 'run.json'} cannot be read; start the run again")
    if before.get("target") != identity["target"]:
        raise InputError(f"{output} holds a run of another target; give that target")
    for name in ("data", "held_out_data"):
        if before.get(name, []) != identity[name]:
            raise InputError(
                f"{output} holds a run with other `{name}`; give the same files"
            )
    if before.get("begin_with") != identity.get("begin_with"):
        raise InputError(
            f"{output} holds a run that began with another head, or with a new one; "
            "give the same `begin_with`"
        )
    check_settings(output, before.get("settings"), config)
    if before.get("mesh", identity["mesh"]) != identity["mesh"]:
        report(
            f"warning: the run began on the mesh {before.get('mesh')} and goes on on "
            f"{identity['mesh']}: sums may round differently"
        )


def _run(
    trained: Trained,
    sharding: PairSharding,
    report: Report,
    progress: Progress,
) -> Trained:
    """Trains and exports the best head."""
    config, output = trained.config, trained.head.parent
    target_params = trained.pair.params.target
    is_eagle = isinstance(trained.step_config.head, EagleHeadConfig)
    has_table = is_eagle and config.head.include_embedding
    table = target_params.embedding if has_table else None
    is_first = jax.process_index() == 0

    def export(params: Any) -> None:
        fetched, embedding = sharding.fetch((params, table))
        if is_first:
            _export(trained, fetched, embedding, keeps_calibration=was_finished)

    data = trained.data
    if config.data.cache_features:
        with progress("computing features", len(data.rows)) as update:
            features = _write_features(trained, sharding, update)
        data = dataclasses.replace(data, features=features)
    title = f"{output.name}: a head for {trained.target.name}"
    run = Run(
        config=config,
        step_config=trained.step_config,
        target_params=target_params,
        sharding=sharding,
        data=data,
        folder=output,
        first=trained.first,
    )
    was_finished = run.first_step == config.run.steps
    summary = "finished before" if was_finished else trained.summary
    with (
        contextlib.closing(run),
        progress("step", config.run.steps, run.first_step, pause=0) as update,
    ):

        def observe(row: LogRow) -> None:
            nonlocal summary
            loss, agreement = row.metrics["loss"], row.metrics["agreement"]
            update(
                row.step,
                f"loss {loss:.4f} | agreement {agreement:.3f} | "
                f"{row.tokens_per_second:,.0f} tokens/s",
            )
            if row.evaluation is not None:
                summary = f"step {row.step} | {row.evaluation.summary()}"
                report(f"  held out | {summary}")
                if is_first:
                    plot_log(output / "log.csv", output / "curve.png", title=title)

        if run.first_step:
            report(f"going on after step {run.first_step}")
        try:
            export(run.train(observe))
        except DivergedError as error:
            best = run.best()
            if best is None:
                raise
            export(best)
            raise InputError(
                f"{error}; {trained.head.name}/ holds the best so far"
            ) from error
    return dataclasses.replace(trained, summary=summary)


def _export(
    trained: Trained, params: Any, embedding: Any, *, keeps_calibration: bool
) -> None:
    """Writes the best heads in the published layout of their kind."""
    head, folder = trained.step_config.head, trained.head
    fitted = folder / CALIBRATION_FILE

    def also(unfinished: Path) -> None:
        if keeps_calibration and fitted.is_file():
            shutil.copy(fitted, unfinished)

    settings: Any = {"dtype": "float32", "also": also, "overwrite": True}
    if isinstance(head, EagleHeadConfig):
        checkpoints.export_head(folder, head, params, embedding=embedding, **settings)
        return
    if isinstance(head, Eagle3HeadConfig):
        checkpoints.export_eagle3(folder, head, params, **settings)
        return
    params, is_hydra = tie_blocks(params, head), isinstance(head, HydraConfig)
    export: Any = checkpoints.export_hydra if is_hydra else checkpoints.export_medusa
    base = str(trained.target)
    export(folder, head, params, base_model=base, dtype="float32", overwrite=True)


def _write_features(
    trained: Trained, sharding: PairSharding, update: Callable[[int], None]
) -> FeatureStore:
    """Computes the target's features of all rows, or what the run's folder lacks.

    They are kept in the type that they are computed in, so stored features give the
    same numbers as computed ones.
    """
    step = trained.step_config
    compute = jax.jit(functools.partial(read_target, step))
    params = trained.pair.params.target
    return write_features(
        trained.head.parent / "features",
        trained.data.rows,
        lambda batch: sharding.fetch(compute(params, sharding.put_rows(batch))),
        settings={
            "target": str(trained.target.resolve()),
            "feature_layers": step.target.config.feature_layers,
            "dtype": step.dtype,
        },
        batch_size=trained.config.run.batch_size,
        progress=update,
    )
