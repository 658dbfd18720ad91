"""Train an EAGLE-1/2 head for a target.

    eagle-jax train --target FOLDER --data chats.jsonl --output RUN
    eagle-jax train ... --mesh data=2,tensor=4

The run's folder gets `head/`, the best head in the official layout, beside the log,
its plot and the checkpoints. The same command with `--resume` goes on where it was
stopped, bit for bit.
"""

import argparse
import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax

from eagle_jax import checkpoints
from eagle_jax.checkpoints.calibration import CALIBRATION_FILE
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.processes import add_mesh_flags, join, mesh_shape, print_once
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.cli.training_progress import TrainingProgress
from eagle_jax.drafting import EagleHead
from eagle_jax.errors import InputError
from eagle_jax.evaluation.calibrate import calibration_file, describe
from eagle_jax.evaluation.observe import calibrate_pair
from eagle_jax.files import fingerprint_file, is_left_behind, write_json
from eagle_jax.generation.pairs import LoadedPair, open_pair
from eagle_jax.generation.room import check_training
from eagle_jax.interface import Params
from eagle_jax.models import eagle_head
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.parallel import MeshShape, Placement, place, wait_for_all
from eagle_jax.parsing import read_json_if_any, value_at
from eagle_jax.training.checkpoint import LOCK, writing_run
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import cache_features, read_data
from eagle_jax.training.log import plot_log
from eagle_jax.training.loop import DivergedError, LogRow, Run, TrainingData, check_rows
from eagle_jax.training.step import StepConfig

_OURS = {"run.json", "log.csv", "curve.png", "checkpoints", "features", "head"}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def run() -> int:
        arguments = _parse(argv)
        join(arguments)
        print_once()
        config = join_settings(TrainConfig, arguments.config, arguments)
        is_first = jax.process_index() == 0
        with writing_run(arguments.output) if is_first else contextlib.nullcontext():
            return _train(arguments, config)

    return run_command(
        run,
        unwritable="{error}; a run that has begun goes on with --resume",
        interrupted="interrupted; --resume goes on from the last checkpoint",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Train an EAGLE-1/2 head.")
    add = parser.add_argument
    add("--config", type=Path, help="settings from a TOML file of configs/; flags win")
    add("--target", required=True, help="target: a Hugging Face folder or hub name")
    add(
        "--data",
        type=Path,
        required=True,
        nargs="+",
        help="ShareGPT .json, messages or text .jsonl, plain .txt",
    )
    add(
        "--held-out-data",
        type=Path,
        nargs="+",
        default=[],
        help="evaluate on these files instead of a share of the data",
    )
    add("--output", type=Path, required=True, help="folder of the run")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--overwrite", action="store_true", help="replace the run in --output")
    add_mesh_flags(parser)
    add_settings(
        parser,
        TrainConfig,
        *("steps", "batch_size", "row_length", "learning_rate", "warmup_steps"),
        *("noise", "held_out", "too_long", "max_malformed", "cache_features"),
        *("log_every", "eval_every", "keep", "seed", "dtype"),
    )
    return parser.parse_args(argv)


def _train(arguments: argparse.Namespace, config: TrainConfig) -> int:
    output: Path = arguments.output
    _check_output(output, resume=arguments.resume, overwrite=arguments.overwrite)
    folder = checkpoints.resolve(arguments.target)
    dtype = config.run.dtype
    if dtype == "auto":
        dtype = "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"
    before = read_json_if_any(output / "run.json") if arguments.resume else None
    source = open_pair(
        arguments.target,
        None,
        tree=config.tree,
        dtype=dtype,
        date=None if before is None else before.get("date"),
    )
    if config.data.row_length > source.config.max_positions:
        raise InputError(
            f"row_length = {config.data.row_length} is more than the target's "
            f"{source.config.max_positions} positions (max_position_embeddings)"
        )
    shape = mesh_shape(arguments) or MeshShape(data=jax.device_count())
    batch_size = config.run.batch_size
    check_training(
        source.config, dtype, batch_size=batch_size, row_length=config.data.row_length
    )
    placement = place(shape, source.config, batch_size=batch_size)
    if config.data.cache_features and jax.process_count() > 1:
        raise InputError("--cache-features is for one process; leave it out")
    head = _head_config(source.config, config)
    placement = placement.with_drafter(
        head.layer, shapes_of(eagle_head.init_params, head)
    )
    identity = _identity(arguments, config, folder, shape)
    identity["date"] = source.date
    is_first = jax.process_index() == 0
    report = say if is_first else _keep_silent
    if arguments.resume:
        _check_same_run(output, before, identity)
    report("reading the data")
    data = read_data(
        arguments.data,
        arguments.held_out_data,
        source.tokenizer,
        source.config,
        config,
        stop_tokens=checkpoints.stop_tokens(folder),
        report=report,
    )
    check_rows(data.rows, batch_size)
    report(f"loading {arguments.target}")
    pair = source.load(placement)
    step_config = StepConfig(
        target=Transformer(config=source.config, dtype=pair.target.dtype),
        head=head,
        loss=config.loss,
        optimizer=config.optimizer,
        steps=config.run.steps,
        dtype=pair.target.dtype,
    )
    wait_for_all("all have looked at the output")
    if is_first:
        if arguments.overwrite:
            _remove_run(output)
        write_json(output / "run.json", identity)
    wait_for_all("the output is there")
    if config.data.cache_features:
        with progress("computing features", len(data.rows)) as update:
            features = cache_features(
                output / "features",
                data.rows,
                pair.params.target,
                placement,
                step_config=step_config,
                target=identity["target"],
                batch_size=batch_size,
                progress=update,
            )
        data = dataclasses.replace(data, features=features)
    title = f"{output.name}: a head for {folder.name}"
    summary = _run(
        config, step_config, pair.params.target, placement, data, output, title
    )
    if config.run.calibrate:
        _calibrate(config, step_config, pair, data, output)
    print(f"{output / 'head'} | {summary}")
    return 0


def _run(
    config: TrainConfig,
    step_config: StepConfig,
    target_params: TransformerParams,
    placement: Placement,
    data: TrainingData,
    output: Path,
    title: str,
) -> str:
    """Trains, exports the best head, and returns the last evaluation in one line."""
    table = target_params.embedding if config.head.include_embedding else None
    is_first = jax.process_index() == 0

    def export(params: EagleHeadParams) -> None:
        fetched, embedding = placement.fetch((params, table))
        if is_first:
            checkpoints.export_head(
                output / "head",
                step_config.head,
                fetched,
                embedding=embedding,
                dtype="float32",
                overwrite=True,
            )

    with TrainingProgress(config.run.steps, is_shown=is_first) as shown:

        def observe(row: LogRow) -> None:
            shown.update(row)
            if is_first and row.evaluation is not None:
                plot_log(output / "log.csv", output / "curve.png", title=title)

        run = Run(
            config=config,
            step_config=step_config,
            target_params=target_params,
            placement=placement,
            data=data,
            folder=output,
            observe=observe,
        )
        if run.first_step and is_first:
            say(f"going on after step {run.first_step}")
        shown.start(run.first_step)
        try:
            export(run.train())
        except DivergedError as error:
            best = run.best()
            if best is None:
                raise
            export(best)
            raise InputError(
                f"{error}; the best head so far is in {output}/head"
            ) from error
        finally:
            run.close()
    return shown.summary()


def _calibrate(
    config: TrainConfig,
    step_config: StepConfig,
    pair: LoadedPair,
    data: TrainingData,
    output: Path,
) -> None:
    """Writes what the new head's confidences are worth on the held-out prompts."""
    if jax.process_count() > 1:
        advice = "scripts/evaluate.py --nodes and scripts/calibrate.py"
        if jax.process_index() == 0:
            say(f"several processes write no calibration; one can, with {advice}")
        return
    say("calibrating")
    target, folder = step_config.target, output / "head"
    target_params, placement = pair.params.target, pair.placement
    everywhere = None if placement is None else placement.everywhere
    _, head = checkpoints.load_head(
        folder, target.config, target_params, step_config.dtype, everywhere
    )
    model = EagleHead(config=step_config.head, dtype=step_config.dtype)
    try:
        fits = calibrate_pair(
            target,
            model,
            Params(target=target_params, drafter=model.join(head, target_params)),
            data.prompts,
            tree=config.tree,
            max_new_tokens=config.run.eval_new_tokens,
            max_length=target.config.max_positions,
            stop_tokens=data.stop_tokens,
        )
    except InputError as error:
        say(f"warning: no calibration is written: {error}")
        return
    source = ["held-out prompts of scripts/train.py"]
    result = calibration_file(target.config.vocab_size, fits, source)
    write_json(folder / CALIBRATION_FILE, result)
    for kind, fitted in fits.items():
        say(f"{kind}: {describe(fitted)}")


def _head_config(target: TransformerConfig, config: TrainConfig) -> EagleHeadConfig:
    """Returns the sizes of the new head: the target's but for what is set."""
    sizes, layer = config.head, target.layer
    num_heads = sizes.num_heads or layer.num_heads  # None, as sizes are never 0.
    if layer.hidden_size % (2 * num_heads):
        raise InputError(
            f"num_heads = {num_heads} must divide the target's hidden_size = "
            f"{layer.hidden_size} into an even head_dim; set [head] num_heads"
        )
    num_kv_heads = sizes.num_kv_heads or min(layer.num_kv_heads, num_heads)
    if num_heads % num_kv_heads:
        raise InputError(
            f"num_kv_heads = {num_kv_heads} must divide num_heads = {num_heads}"
        )
    return EagleHeadConfig(
        layer=dataclasses.replace(
            layer,
            intermediate_size=sizes.intermediate_size or layer.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=layer.hidden_size // num_heads,
            qkv_bias=False,
            qk_norm=False,
            num_experts=0,
            experts_per_token=0,
        ),
        vocab_size=target.vocab_size,
        max_positions=min(target.max_positions, config.data.row_length),
        fc_bias=sizes.fc_bias,
    )


def _identity(
    arguments: argparse.Namespace, config: TrainConfig, folder: Path, shape: MeshShape
) -> dict[str, Any]:
    """Returns what a resumed run must have in common with the run it resumes."""
    paths = [*arguments.data, *arguments.held_out_data]
    for path in paths:
        if not path.is_file():
            raise InputError(f"cannot read the data {path}: it is no file")
    return {
        "target": checkpoints.fingerprint_folder(folder),
        "data": [fingerprint_file(path) for path in paths],
        "mesh": str(shape),
        "settings": dataclasses.asdict(config),
    }


def _check_output(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuses an output folder before any long work starts."""
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other")
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    # What a kill left half-written has a hidden name.
    names = {name for name in names - {LOCK} if not is_left_behind(name, _OURS)}
    if resume:
        if "run.json" not in names:
            raise InputError(f"--resume: {output} holds no run; leave out --resume")
        return
    if names and not overwrite:
        raise InputError(
            f"{output} is not empty; give --resume to go on with its run, --overwrite "
            "to replace it, or another name"
        )
    if names and ("run.json" not in names or names - _OURS):
        raise InputError(
            f"{output} is not replaced: it holds something else than a run "
            f"({', '.join(sorted(names - _OURS)[:3]) or 'no run.json'})"
        )


def _check_same_run(
    output: Path, before: dict[str, Any] | None, identity: dict[str, Any]
) -> None:
    """Refuses to go on with other settings, data or another target."""
    if before is None:
        raise InputError(f"{output / 'run.json'} cannot be read; start the run again")
    if before.get("target") != identity["target"]:
        raise InputError(f"{output} holds a run of another target; give that target")
    if before.get("data") != identity["data"]:
        raise InputError(f"{output} holds a run on other data; give the same files")
    if before.get("date") != identity["date"]:
        raise InputError(
            f"{output} holds a run that did not record which date its chat template "
            "was given, so its rows cannot be made again; start it again"
        )
    for table, values in identity["settings"].items():
        for name, value in values.items():
            earlier = value_at(before, "settings", table, name)
            if earlier != value:
                raise InputError(
                    f"{output} holds a run with {name} = {earlier}, not {value}; a "
                    "resumed run keeps its settings"
                )
    if before.get("mesh", identity["mesh"]) != identity["mesh"]:
        say(
            f"warning: the run began on the mesh {before.get('mesh')} and goes on on "
            f"{identity['mesh']}: sums may round differently"
        )


def _keep_silent(_: str) -> None:
    pass


def _remove_run(output: Path) -> None:
    """Removes a run, its mark last: a kill leaves what can be overwritten again."""
    if not output.is_dir():
        return
    for path in sorted(output.iterdir(), key=lambda path: path.name == "run.json"):
        if path.name not in _OURS and not is_left_behind(path.name, _OURS):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
