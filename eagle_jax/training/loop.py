"""A training run: steps, evaluations and checkpoints until the last step."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.engine import Pair
from eagle_jax.errors import InputError
from eagle_jax.heads.loss import Metrics
from eagle_jax.heads.rows import known_tokens
from eagle_jax.logs import JsonLines
from eagle_jax.parallel import PairSharding
from eagle_jax.training.checkpoint import LOG, Checkpoints, read_rows
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import TrainingData
from eagle_jax.training.evaluate import Evaluation, make_evaluation
from eagle_jax.training.packing import rows_at
from eagle_jax.training.step import (
    StepConfig,
    TrainState,
    init_state,
    read_target,
    state_shapes,
    state_shardings,
    train_step,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRow:
    """A row of a run's log.

    Attributes:
        step: The number of steps done.
        tokens: The tokens trained on since step 0, without padding.
        metrics: The means since the row before, by name.
        tokens_per_second: The speed since the row before, evaluations left out.
        evaluation: The evaluation after this step; `None` where none was made.
    """

    step: int
    tokens: int
    metrics: dict[str, float]
    tokens_per_second: float
    evaluation: Evaluation | None = None

    def columns(self) -> dict[str, Any]:
        """Returns the row as a log has it, without what is not known."""
        columns: dict[str, Any] = {"step": self.step, "tokens": self.tokens}
        columns |= self.metrics
        columns["tokens_per_second"] = self.tokens_per_second
        if self.evaluation is not None:
            result = self.evaluation
            columns["held_out_loss"] = result.loss
            columns["held_out_agreement"] = result.agreement
            columns["tokens_per_round"] = result.tokens_per_round
        known = {name: x for name, x in columns.items() if x is not None}
        return {name: x for name, x in known.items() if math.isfinite(x)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A run, which is finished when `train_head` returns it.

    Attributes:
        target: The target's folder.
        head: The folder of the best head, in the official format.
        config: All settings of the run.
        identity: Whatever determines its weights, as JSON can hold it.
        step_config: The static settings of a step.
        pair: The target as it was loaded.
        data: The data that was read.
        summary: The last evaluation in one line, or why there is none.
        first: The weights that the run began with, float32; `None` for new ones.
    """

    target: Path
    head: Path
    config: TrainConfig
    identity: Mapping[str, Any] = dataclasses.field(repr=False)
    step_config: StepConfig = dataclasses.field(repr=False)
    pair: Pair = dataclasses.field(repr=False)
    data: TrainingData = dataclasses.field(repr=False)
    summary: str
    first: Any = dataclasses.field(default=None, repr=False)


class DivergedError(InputError):
    """The error of a loss that is no longer finite."""


class Run:
    """One run: its state, its folder and its compiled step."""

    def __init__(self, trained: Trained, sharding: PairSharding) -> None:
        """Starts a run, or resumes one at its newest checkpoint.

        Args:
            trained: The run. Its folder, that of `head`, gets `checkpoints/`, and its
                log is written by the first process.
            sharding: The shardings of target and head.
        """
        config, step_config = trained.config, trained.step_config
        self._config, self._step_config, self._data = config, step_config, trained.data
        self._folder, self._sharding = trained.head.parent, sharding
        self._target_params = trained.pair.params.target
        self._checkpoints = Checkpoints(
            self._folder / "checkpoints", keep=config.run.keep, best="chain_length"
        )
        shardings = state_shardings(step_config, sharding)
        self._shapes = state_shapes(step_config, shardings)
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
            self._state = self._restore(latest)
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
        # Traced as decoding is: a mixture must know the mesh that its experts lie on.
        self._read = sharding.shard(functools.partial(read_target, step_config))
        self._evaluate = make_evaluation(
            self._data,
            self._read,
            config=config,
            step_config=step_config,
            sharding=sharding,
        )

    def train(self, observe: Callable[[LogRow], None]) -> Any:
        """Trains to the last step; returns the best head, float32.

        Args:
            observe: Called with every row of the log.

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
            row = LogRow(
                step=done,
                tokens=tokens,
                metrics=means,
                tokens_per_second=(tokens - logged_tokens) / seconds,
                evaluation=evaluation,
            )
            if self._log is not None:
                self._log.append(row.columns())
            if evaluation is not None:
                measured = {"chain_length": evaluation.chain_length}
                self._checkpoints.save(done, self._state, measured)
            observe(row)
            logged_tokens, pending = tokens, []
            started = time.perf_counter()
        best = self.best()
        assert best is not None, "the last step always writes a checkpoint"
        return best

    def best(self) -> Any:
        """Returns the best head of the checkpoints, float32, `None` without any."""
        best = self._checkpoints.best()
        return None if best is None else self._restore(best).params

    def _restore(self, step: int) -> TrainState:
        return self._checkpoints.restore(step, self._shapes)

    def close(self) -> None:
        """Closes the log, and the checkpoints when the last one is written."""
        self._checkpoints.close()
        if self._log is not None:
            self._log.close()

    def _one_step(self, step: int) -> tuple[TrainState, Metrics, int]:
        run, data = self._config.run, self._data
        chosen = rows_at(len(data.rows), step, run.batch_size, run.seed)
        rows = data.rows[chosen]
        features = None if data.features is None else data.features[chosen]
        rows_there, features = self._sharding.put_rows((rows, features))
        if features is None:
            features = self._read(self._target_params, rows_there)
        state, metrics = self._step(
            self._state,
            self._target_params,
            rows_there,
            features,
            config=self._step_config,
        )
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
