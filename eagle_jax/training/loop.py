"""A training run: steps, evaluations and checkpoints until the last step."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.parallel import PairSharding
from eagle_jax.training.checkpoint import Checkpoints
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import TrainingData
from eagle_jax.training.evaluate import Evaluation, make_evaluation
from eagle_jax.training.heads import count_vocabulary
from eagle_jax.training.log import CsvLog
from eagle_jax.training.loss import Metrics
from eagle_jax.training.packing import PackedRows, rows_at
from eagle_jax.training.sharding import first_state, state_shapes, state_shardings
from eagle_jax.training.step import StepConfig, TrainState, train_step


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
        """Returns the row as columns of the log."""
        columns = {"step": self.step, "tokens": self.tokens} | self.metrics
        columns["tokens_per_second"] = self.tokens_per_second
        if self.evaluation is not None:
            result = self.evaluation
            columns |= {f"alpha_{n}": alpha for n, alpha in enumerate(result.alphas)}
            columns["held_out_loss"] = result.loss
            columns["held_out_agreement"] = result.agreement
            columns["tokens_per_round"] = result.tokens_per_round
        return columns


class DivergedError(InputError):
    """The error of a loss that is no longer finite, or far above what it was."""


class Run:
    """One run: its state, its folder and its compiled step."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        step_config: StepConfig,
        target_params: Any,
        sharding: PairSharding,
        data: TrainingData,
        folder: Path,
        first: Any = None,
    ) -> None:
        """Starts a run, or resumes one at its newest checkpoint.

        Args:
            config: All settings of the run.
            step_config: The static settings of a step.
            target_params: The target's frozen parameters, sharded as `sharding` says.
            sharding: The shardings of target and head.
            data: The data of the run.
            folder: The run's folder, which gets `log.csv`, written by the first
                process, and `checkpoints/`.
            first: The head's weights to begin with, float32; `None` for new ones.

        Raises:
            InputError: If there are fewer rows than a batch takes, or the checkpoint
                cannot be read.
        """
        check_rows(data.rows, config.run.batch_size)
        self._config, self._step_config, self._data = config, step_config, data
        self._folder = folder
        self._sharding, self._target_params = sharding, target_params
        self._checkpoints = Checkpoints(
            folder / "checkpoints", keep=config.run.keep, best="chain_length"
        )
        shardings = state_shardings(step_config, sharding)
        self._shapes = state_shapes(step_config, shardings)
        latest = self._checkpoints.latest()
        self._state = (
            first_state(
                step_config,
                shardings,
                config.run.seed,
                target_params,
                vocabulary=count_vocabulary(data.rows, step_config.head),
                params=first,
            )
            if latest is None
            else self._restore(latest)
        )
        self.first_step = latest or 0
        is_first = jax.process_index() == 0
        self._log = CsvLog(folder / "log.csv", after=self.first_step, writes=is_first)
        self._step = jax.jit(
            train_step,
            static_argnames=("config",),
            donate_argnames=("state",),
            out_shardings=(shardings, sharding.everywhere),
        )
        self._evaluate = make_evaluation(
            data, config=config, step_config=step_config, sharding=sharding
        )
        self._usual_loss: float | None = None
        for loss in self._log.losses:
            self._remember(loss)
        # An overfitted head has not diverged: these are compared with one another.
        self._held_out_loss = next(reversed(self._log.held_out_losses), None)

    def train(self, observe: Callable[[LogRow], None]) -> Any:
        """Trains to the last step; returns the best head, float32.

        Args:
            observe: Called with every row of the log.

        Raises:
            DivergedError: If the loss is no longer finite or explodes; no checkpoint
                is written after that.
        """
        run = self._config.run
        tokens = self._tokens_before(self.first_step)
        logged_tokens, pending = tokens, []
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
            if evaluation is not None:
                loss, before = evaluation.loss, self._held_out_loss
                if self._is_wrong(loss, before):
                    raise DivergedError(self._went_wrong(done, loss, before))
                self._held_out_loss = loss
            row = LogRow(
                step=done,
                tokens=tokens,
                metrics=means,
                tokens_per_second=(tokens - logged_tokens) / seconds,
                evaluation=evaluation,
            )
            self._log.write(row.columns())
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
        """Closes the checkpoints when the last one is written."""
        self._checkpoints.close()

    def _one_step(self, step: int) -> tuple[TrainState, Metrics, int]:
        run, data = self._config.run, self._data
        chosen = rows_at(len(data.rows), step, run.batch_size, run.seed)
        rows = data.rows[chosen]
        features = None if data.features is None else data.features.read(chosen)
        rows_there, features = self._sharding.put_rows((rows, features))
        state, metrics = self._step(
            self._state,
            self._target_params,
            rows_there,
            features,
            config=self._step_config,
        )
        return state, metrics, int((rows.segments > 0).sum())

    def _tokens_before(self, step: int) -> int:
        """Returns the tokens that earlier steps trained on."""
        run, rows = self._config.run, self._data.rows
        per_row = (rows.segments > 0).sum(axis=1)
        batches = (rows_at(len(rows), i, run.batch_size, run.seed) for i in range(step))
        return sum(int(per_row[batch].sum()) for batch in batches)

    def _checked_means(self, pending: list[Metrics], done: int) -> dict[str, float]:
        """Returns the means of metrics, and stops a run that has diverged.

        Raises:
            DivergedError: If it has; names the step and the last good checkpoint.
        """
        fetched = jax.device_get(pending)
        losses = [float(metrics.loss) for metrics in fetched]
        # A window that diverges is no yardstick: the first is judged by its first loss.
        before = self._usual_loss
        self._usual_loss = losses[0] if before is None else before
        for number, loss in enumerate(losses, done - len(losses) + 1):
            if self._is_wrong(loss, self._usual_loss):
                raise DivergedError(self._went_wrong(number, loss, self._usual_loss))
        self._usual_loss = before
        self._remember(float(np.mean(losses)))
        names = ("loss", "feature_loss", "token_loss", "agreement")
        return {
            name: float(np.mean([getattr(metrics, name) for metrics in fetched]))
            for name in names
        }

    def _remember(self, loss: float) -> None:
        usual = self._usual_loss
        self._usual_loss = loss if usual is None else 0.9 * usual + 0.1 * loss

    def _is_wrong(self, loss: float, usual: float | None) -> bool:
        limit = self._config.run.explode * (usual or math.inf)
        return not math.isfinite(loss) or loss > limit

    def _went_wrong(self, step: int, loss: float, before: float | None) -> str:
        latest = self._checkpoints.latest()
        kept = (
            "no checkpoint was written before"
            if latest is None
            else f"the last good checkpoint is {self._folder}/checkpoints/{latest}"
        )
        usual = "" if before is None else f" (before: {before:.4g})"
        return (
            f"the loss of step {step} is {loss:.4g}{usual}: training has diverged; "
            f"{kept}; try a lower learning_rate or more warmup_steps"
        )


def check_rows(rows: PackedRows, batch_size: int) -> None:
    """Refuses a batch that cannot be made, before any long work starts.

    Raises:
        InputError: If there are fewer rows than a batch takes.
    """
    rows_at(len(rows), 0, batch_size, seed=0)
