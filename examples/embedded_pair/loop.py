"""The loop of a run: steps, a log, held-out figures, checkpoints."""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eagle_jax.cli.command import say
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import with_flags
from eagle_jax.config import load_config
from eagle_jax.errors import InputError
from eagle_jax.files import is_left_behind
from eagle_jax.logs import JsonLines
from eagle_jax.training.checkpoint import LOG, Checkpoints
from examples.embedded_pair.corpus import TokenStream
from examples.embedded_pair.training import PretrainRunConfig

Figures = Mapping[str, Any]
"""Scalars by the names that stand in the log."""

Settings = TypeVar("Settings")

MAY_CHANGE = ("steps", "log_every", "eval_every", "eval_rows", "keep")
"""Names of the settings of a run that may differ when it goes on."""


def read_settings(kind: type[Settings], arguments: argparse.Namespace) -> Settings:
    """Returns the settings of a run: the defaults, those of `--config`, the flags."""
    path = arguments.config
    config = kind() if path is None else load_config(path, kind)
    return with_flags(config, arguments)


def take_steps(
    config: PretrainRunConfig,
    state: Any,
    *,
    batch: Callable[[int], Any],
    step: Callable[[Any, Any], tuple[Any, Figures]],
    measure: Callable[[Any], Figures],
    folder: Path,
) -> tuple[Any, Figures]:
    """Takes all steps of a run that are left, on all devices.

    Args:
        config: Length and rhythm of the run.
        state: The state before the first step; a checkpoint in `folder` replaces it.
        batch: A function from a step's number, from 0, to arrays with a row axis first.
        step: A function from state and batch to the next state and the step's figures,
            compiled, which donates the state.
        measure: A function from a state to its held-out figures.
        folder: The folder of the run's checkpoints.

    Returns:
        The last state and its held-out figures.

    Raises:
        InputError: If a figure is not finite: the run has diverged.
    """
    by_row, everywhere = _data_parallel()
    saved = Checkpoints(folder, keep=config.keep)
    state = jax.device_put(state, everywhere)
    first = saved.latest() or 0
    if first:
        state = saved.restore(first, state)
        say(f"going on after step {first}")
    seen: list[Figures] = []
    found: Figures = {}
    started = time.perf_counter()
    with progress("training", config.steps, first) as update:
        for number in range(first, config.steps):
            rows = jax.device_put(batch(number), by_row)
            state, figures = step(state, rows)
            seen.append(figures)
            done = number + 1
            if done % config.log_every == 0 or done == config.steps:
                means = jax.tree.map(
                    lambda *x: float(np.mean(x)), *jax.device_get(seen)
                )
                _check_finite(means, done, folder, saved.latest())
                speed = len(seen) * config.batch_size * config.row_length
                speed /= time.perf_counter() - started
                say(f"step {done} | {_line(means)} | {speed:,.0f} tokens/s")
                seen, started = [], time.perf_counter()
            if done % config.eval_every == 0 or done == config.steps:
                found = measure(state)
                _check_finite(found, done, folder, saved.latest())
                say(f"  held out | step {done} | {_line(found)}")
                saved.save(done, state, {})
                started = time.perf_counter()
            update(done)
    if first >= config.steps:
        found = measure(state)
    saved.close()
    return state, found


def check_output(output: Path, *, resume: bool) -> None:
    """Refuses a folder that holds something else, before any long work starts."""
    if resume and not (output / LOG).is_file():
        raise InputError(f"--resume: {output} holds no run; leave out --resume")
    names = {path.name for path in output.iterdir()}
    is_taken = not all(is_left_behind(name, [LOG]) for name in names)
    if is_taken and not resume:
        raise InputError(
            f"{output} is not empty; give --resume to go on with its run, or another "
            "folder"
        )


def begin_log(output: Path, config: Any, facts: Mapping[str, Any]) -> None:
    """Records what makes a run, and refuses to go on with another; steps may grow."""
    settings = dataclasses.asdict(config) | dict(facts)
    for name in MAY_CHANGE:
        del settings["run"][name]
    JsonLines(output / LOG, settings).close()


def check_sizes(streams: dict[str, TokenStream], config: PretrainRunConfig) -> None:
    """Refuses texts too short for one batch."""
    if config.batch_size % jax.device_count():
        raise InputError(
            f"batch_size = {config.batch_size} must be a multiple of the "
            f"{jax.device_count()} devices"
        )
    for name, rows in (("train", config.batch_size), ("held_out", 1)):
        stream = streams[name]
        if stream.num_rows(config.row_length) < rows:
            raise InputError(
                f"the {name} texts have {len(stream.tokens)} tokens, too few for "
                f"{rows} rows of row_length = {config.row_length}; give more text, or "
                "lower row_length or batch_size"
            )


def _line(figures: Figures) -> str:
    return " | ".join(f"{name} {value:.4g}" for name, value in figures.items())


def _data_parallel() -> tuple[NamedSharding, NamedSharding]:
    """Returns how rows lie on all devices, each its share, and weights, on all."""
    shape = (jax.device_count(),)
    mesh = jax.make_mesh(shape, ("data",), axis_types=(AxisType.Auto,))
    return (
        NamedSharding(mesh, PartitionSpec("data")),
        NamedSharding(mesh, PartitionSpec()),
    )


def _check_finite(
    figures: Figures, step: int, folder: Path, latest: int | None
) -> None:
    """Stops a run that has diverged, before anything of it is kept."""
    for name, value in figures.items():
        if not math.isfinite(value):
            kept = "there is none" if latest is None else f"{folder}/{latest}"
            raise InputError(
                f"at step {step} the {name} is {value}: training has diverged; the "
                f"last good checkpoint: {kept}; try a lower learning_rate"
            )
