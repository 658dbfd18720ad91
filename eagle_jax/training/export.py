"""The head of any checkpoint of a run, in the published layout."""

import dataclasses
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from eagle_jax import checkpoints
from eagle_jax.errors import InputError, first_line
from eagle_jax.heads import Head, export_head, open_head
from eagle_jax.heads.levels import tie_weights
from eagle_jax.logs import read_log
from eagle_jax.models.transformer import Transformer
from eagle_jax.parsing import parse_json
from eagle_jax.training.begin import begun_head
from eagle_jax.training.checkpoint import LOG
from eagle_jax.training.config import TrainConfig, new_head
from eagle_jax.training.step import StepConfig, TrainState, init_state


def export_checkpoint(path: Path, folder: Path) -> None:
    """Writes the head of a checkpoint as the run writes its best one.

    Args:
        path: The checkpoint, `RUN/checkpoints/STEP`. The run may still go on.
        folder: The folder to write, see `heads.export_head`.

    Raises:
        InputError: If it is no checkpoint of a run, or the target that the run names
            is not there.
    """
    log = path.absolute().parent.parent / LOG
    first = next(read_log(log), None) if path.is_dir() and log.is_file() else None
    if first is None:
        raise InputError(
            f"{path} is no checkpoint of a training run; give RUN/checkpoints/STEP"
        )
    where, line = first
    run = parse_json(line, where)["run"]
    config = TrainConfig.from_table(run["settings"], where)
    source = checkpoints.resolve(run["target"])
    target = checkpoints.target_config(source)
    if run["begin_with"] is None:
        head = new_head(target, config)
    else:
        begun = open_head(checkpoints.resolve(run["begin_with"]), target).head
        head = begun_head(begun, target, config)
    params = _restore(path, head, config, Transformer(config=target)).params
    params = tie_weights(params)
    if getattr(config.head, "include_embedding", False):
        table = checkpoints.read_embedding(source, config.run.dtype)
        params = dataclasses.replace(params, embedding=table)
    how = checkpoints.Export(base_model=str(source))
    export_head(folder, head, params, how)


def _restore(
    path: Path, head: Head, config: TrainConfig, target: Transformer
) -> TrainState:
    """Reads the state of a checkpoint onto one device."""
    step = StepConfig(
        target=target,
        head=head,
        loss=config.loss,
        optimizer=config.optimizer,
        steps=config.run.steps,
    )
    there = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
        jax.eval_shape(lambda: init_state(step, 0)),
    )
    try:
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(path.absolute() / "default", like)
    except Exception as error:  # Orbax and tensorstore have many kinds.
        raise InputError(f"cannot read {path}: {first_line(error)}") from error
