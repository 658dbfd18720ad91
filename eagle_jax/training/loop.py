"""A training run: steps, evaluations and checkpoints until the last step."""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.heads.loss import Metrics
from eagle_jax.heads.rows import PackedRows, compared_tokens, known_tokens
from eagle_jax.logs import JsonLines
from eagle_jax.models.transformer import output_columns
from eagle_jax.parallel import PairSharding
from eagle_jax.reporting import Progress, show_nothing
from eagle_jax.training.checkpoint import FEATURES, LOG, Checkpoints, read_rows
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import TrainingData, cached_features
from eagle_jax.training.evaluate import Evaluation, make_evaluation
from eagle_jax.training.packing import rows_at
from eagle_jax.training.step import (
    StepConfig,
    TrainState,
    init_state,
    read_target,
    state_shapes,
    train_step,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A run, which is finished when `train_head` returns it.

    Attributes:
        target: The target's folder.
        head: The folder of the best head, in the official format.
        config: All settings of the run.
        identity: Whatever determines its weights, as JSON can hold it.
        step_config: The static settings of a step.
        target_params: The target's weights.
        data: The data that was read.
        summary: The last evaluation in one line, or why there is none.
        first: The weights that the run began with, float32; `None` for new ones.
    """

    target: Path
    head: Path
    config: TrainConfig
    identity: Mapping[str, Any] = dataclasses.field(repr=False)
    step_config: StepConfig = dataclasses.field(repr=False)
    target_params: Any = dataclasses.field(repr=False)
    data: TrainingData = dataclasses.field(repr=False)
    summary: str
    first: Any = dataclasses.field(default=None, repr=False)


class DivergedError(InputError):
    """The error of a loss that is no longer finite."""


class Run:
    """One run: its state, its folder and its compiled step."""

    def __init__(
        self,
        trained: Trained,
        sharding: PairSharding,
        progress: Progress = show_nothing,
    ) -> None:
        """Starts a run, or resumes one at its newest checkpoint.

        Args:
            trained: The run. Its folder, that of `head`, gets `checkpoints/`, and its
                log is written by the first process.
            sharding: The shardings of target and head.
            progress: Called to show how far features are computed, if they are kept.
        """
        config, step_config = trained.config, trained.step_config
        self._config, self._step_config, self._data = config, step_config, trained.data
        self._folder, self._sharding = trained.head.parent, sharding
        self._target_params = self._compared = trained.target_params
        head, rows = step_config.head, trained.data.rows
        tokens = compared_tokens(rows, head.config, config.loss)
        if tokens is not None:
            narrow = jax.jit(output_columns, out_shardings=sharding.everywhere)
            columns = narrow(self._target_params, tokens)
            self._compared = dataclasses.replace(
                self._target_params, output_head=columns
            )
        # Traced as decoding is: a mixture must know the mesh that its experts lie on.
        self._read = sharding.shard(functools.partial(read_target, step_config))
        self._features = None
        if config.data.cache_features:
            rows = trained.data.rows
            with progress("computing features", len(rows)) as update:
                # In the type that they are computed in: the numbers are the same.
                self._features = cached_features(
                    self._folder / FEATURES,
                    rows,
                    lambda batch: sharding.fetch(self._read_rows(batch)),
                    batch_size=config.run.batch_size,
                    dtype=step_config.dtype,
                    progress=update,
                )
        self._checkpoints = Checkpoints(
            self._folder / "checkpoints", keep=config.run.keep, best="chain_length"
        )
        self._shapes = state_shapes(step_config, sharding)
        shardings = jax.tree.map(lambda x: x.sharding, self._shapes)
        latest = self._checkpoints.latest()
        if latest is None:
            # Each shard is made on its own device.
            init = functools.partial(init_state, step_config, config.run.seed)
            self._state = jax.jit(init, out_shardings=shardings)(
                self._target_params,
                vocabulary=known_tokens(trained.data.rows, step_config.head.config),
                params=trained.first,
            )
        else:
            self._state = self._checkpoints.restore(latest, self._shapes)
        self.first_step = latest or 0
        log = self._folder / LOG
        rows = [row for row in read_rows(log) if row["step"] <= self.first_step]
        self._tokens = rows[-1]["tokens"] if rows else 0
        is_first = jax.process_index() == 0
        self._log = JsonLines(log, trained.identity) if is_first else None
        if self._log is not None:  # This run will write what followed again.
            self._log.keep(len(rows))
        self._step = jax.jit(
            train_step,
            static_argnames=("config",),
            donate_argnames=("state",),
            out_shardings=(shardings, sharding.everywhere),
        )
        self._evaluate = make_evaluation(
            self._data,
            self._read,
            config=config,
            step_config=step_config,
            sharding=sharding,
        )

    def train(self) -> Iterator[tuple[dict[str, Any], Evaluation | None]]:
        """Trains to the last step.

        Yields:
            Every row of the log, and the evaluation that it is of, if any.

        Raises:
            DivergedError: If the loss is no longer finite; no checkpoint is written
                after that.
        """
        run = self._config.run
        tokens = logged_tokens = self._tokens
        pending: list[Metrics] = []
        started = time.perf_counter()
        for step in range(self.first_step, run.steps):
            self._state, metrics, count = self._one_step(step)
            pending.append(metrics)
            tokens += count
            done = step + 1
            evaluates = done % run.eval_every == 0 or done == run.steps
            if not (evaluates or done % run.log_every == 0):
                continue
            means = self._checked_means(pending, done)
            seconds = time.perf_counter() - started
            evaluation = None
            if evaluates:
                evaluation = self._evaluate(self._state.params, self._target_params)
                self._check_finite(done, evaluation.loss)
            speed = (tokens - logged_tokens) / seconds
            row = log_row(done, tokens, means, speed, evaluation)
            if self._log is not None:
                self._log.append(row)
            if evaluation is not None:
                measured = {"chain_length": evaluation.chain_length}
                self._checkpoints.save(done, self._state, measured)
            yield row, evaluation
            logged_tokens, pending = tokens, []
            started = time.perf_counter()

    def best(self) -> Any:
        """Returns the best head of the checkpoints, float32, `None` without any."""
        if (best := self._checkpoints.best()) is None:
            return None
        return self._checkpoints.restore(best, self._shapes).params

    def close(self) -> None:
        """Closes the log, and the checkpoints when the last one is written."""
        self._checkpoints.close()
        if self._log is not None:
            self._log.close()

    def _read_rows(self, rows: PackedRows) -> jax.Array:
        return self._read(self._target_params, self._sharding.put_rows(rows))

    def _one_step(self, step: int) -> tuple[TrainState, Metrics, int]:
        run, rows = self._config.run, self._data.rows
        chosen = rows_at(len(rows), step, run.batch_size, run.seed)
        rows = rows[chosen]
        if self._features is None:
            features = self._read_rows(rows)
        else:
            features = self._sharding.put_rows(self._features[chosen])
        given = self._compared, self._sharding.put_rows(rows), features
        state, metrics = self._step(self._state, *given, config=self._step_config)
        return state, metrics, int((rows.segments > 0).sum())

    def _checked_means(self, pending: list[Metrics], done: int) -> dict[str, float]:
        """Returns the means of metrics, and stops a run that has diverged."""
        fetched = jax.device_get(pending)
        for number, metrics in enumerate(fetched, done - len(fetched) + 1):
            self._check_finite(number, float(metrics.loss))
        names = ("loss", "feature_loss", "token_loss", "agreement")
        return {
            name: float(np.mean([getattr(metrics, name) for metrics in fetched]))
            for name in names
        }

    def _check_finite(self, step: int, loss: float) -> None:
        if math.isfinite(loss):
            return
        latest = self._checkpoints.latest()
        kept = (
            "no checkpoint was written before"
            if latest is None
            else f"the last good checkpoint is {self._folder}/checkpoints/{latest}"
        )
        raise DivergedError(
            f"the loss of step {step} is no finite number: training has diverged; "
            f"{kept}; try a lower learning_rate or more warmup_steps"
        )


def log_row(
    step: int,
    tokens: int,
    means: Mapping[str, float],
    speed: float,
    evaluation: Evaluation | None,
) -> dict[str, Any]:
    """Returns a row of a run's log, without what is not known.

    Args:
        step: The number of steps done.
        tokens: The tokens trained on since step 0, without padding.
        means: The means of metrics since the row before, by name.
        speed: The tokens per second since the row before, evaluations left out.
        evaluation: The evaluation after this step; `None` where none was made.
    """
    row: dict[str, Any] = {"step": step, "tokens": tokens, **means}
    row["tokens_per_second"] = speed
    if evaluation is not None:
        row["held_out_loss"] = evaluation.loss
        row["held_out_agreement"] = evaluation.agreement
        row["tokens_per_round"] = evaluation.tokens_per_round
    return {n: x for n, x in row.items() if x is not None and math.isfinite(x)}
