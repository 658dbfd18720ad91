"""The head of a run: the weights that it begins with, and those that it exports."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from eagle_jax import checkpoints
from eagle_jax.checkpoints.export_files import copy_beside
from eagle_jax.engine import Pair
from eagle_jax.errors import InputError, first_line
from eagle_jax.heads import Head, export_head, open_head
from eagle_jax.heads.levels import PositionHeads, tie_weights
from eagle_jax.logs import read_log
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import PairSharding
from eagle_jax.parallel.placement import draft_shardings
from eagle_jax.parsing import parse_json
from eagle_jax.training.checkpoint import LOG
from eagle_jax.training.config import TrainConfig, new_head
from eagle_jax.training.step import StepConfig, init_state

_NO_SIZES = ("kind", "include_embedding")  # Of settings: the rest is the head's.


def open_beginning(
    folder: Path | None, source: Pair, config: TrainConfig
) -> tuple[Head, Callable[[Any, PairSharding], Any]]:
    """Opens a head to begin with, whose sizes, rope and biases are kept.

    Args:
        folder: The head's folder; `None` for a new head.
        source: The target, opened from its files. In the type that its weights have
            in this run its embedding table and the head's must be equal: a head may
            have been exported so.
        config: All settings of the run, of which `head` sets no size.

    Returns:
        The head, and the function from the target's parameters and all shardings to
        its weights, float32; `None` for random ones.
    """
    kind, target = config.kind, source.sizes
    if folder is None:
        return new_head(target, config), lambda *_: None
    assert source.folder is not None, "targets are trained for from their files"
    if issubclass(kind, PositionHeads):
        raise InputError("`begin_with` is for EAGLE heads; leave it out")
    opened = open_head(folder, target)
    if type(opened.head) is not kind:
        raise InputError(
            f"{folder} holds {opened.head.title}, and heads of kind {kind.name} are "
            "trained; begin with one of these, or train the other kind"
        )
    opened.head.to_hf_config(checkpoints.Export())  # It can be exported.
    _check_sizes(config)
    own = opened.own_table(source.dtype)
    if own is not None:
        table = checkpoints.read_embedding(source.folder, source.dtype)
        if not np.array_equal(own, np.asarray(table)):
            raise InputError(
                f"{folder} holds a head with an embedding table of its own, and heads "
                "are trained with the target's; begin with another head"
            )
    head = _begun_head(opened.head, target, config)

    def read(target_params: Any, sharding: PairSharding) -> Any:
        shardings = draft_shardings(sharding, head.init, head.config)
        params = opened.load(target_params, "float32", shardings)
        return dataclasses.replace(params, embedding=None)  # It is the target's.

    return head, read


def _begun_head(head: Head, target: TransformerConfig, config: TrainConfig) -> Head:
    """Returns a head, of whose sizes the positions become those of the data."""
    length = min(target.max_positions, config.data.row_length)
    length = max(head.config.max_positions, length)
    sizes = dataclasses.replace(head.config, max_positions=length)
    return dataclasses.replace(head, config=sizes)


def _check_sizes(config: TrainConfig) -> None:
    """Refuses settings of sizes, which are the head's own."""
    usual = config.kind.Settings()
    for name, value in vars(config.head).items():
        if name not in _NO_SIZES and value != getattr(usual, name):
            raise InputError(
                f"{name} = {value}: the head of `begin_with` keeps its own; leave it "
                "out of [head]"
            )


def write_head(
    folder: Path, head: Head, params: Any, embedding: Any, how: checkpoints.Export
) -> None:
    """Writes a head as a run exports it, in the published layout of its kind.

    Args:
        folder: The folder to write.
        head: The head.
        params: Its weights as they are trained, float32.
        embedding: The target's embedding table, if the folder shall hold it.
        how: How it is written.
    """
    params = tie_weights(params)
    if embedding is not None:
        params = dataclasses.replace(params, embedding=embedding)
    export_head(folder, head, params, how)


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
        head = _begun_head(begun, target, config)
    step = StepConfig.of(config, Transformer(config=target), head)
    # The state is read onto one device.
    there = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
        jax.eval_shape(lambda: init_state(step, 0)),
    )
    try:
        with ocp.StandardCheckpointer() as reader:
            state = reader.restore(path.absolute() / "default", like)
    except Exception as error:  # Orbax and tensorstore have many kinds.
        raise InputError(f"cannot read {path}: {first_line(error)}") from error
    has_table = getattr(config.head, "include_embedding", False)
    table = checkpoints.read_embedding(source, config.run.dtype) if has_table else None
    beside = copy_beside(log.parent)
    how = checkpoints.Export(base_model=str(source), also=beside)
    write_head(folder, head, state.params, table, how)
