"""How a training run is doing: a bar on a terminal, a line per log row elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_jax.cli.command import say
from eagle_jax.training.loop import LogRow


class TrainingProgress:
    """Shows each row of the log and keeps the last evaluation."""

    def __init__(self, steps: int, *, is_shown: bool = True) -> None:
        """Takes the steps of the whole run, and whether this process shows it."""
        self._steps, self._is_shown = steps, is_shown
        self._console = Console(stderr=True)
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            disable=not is_shown or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("training", total=steps, state="")
        self._started, self._first_step = time.monotonic(), 0
        self._last: LogRow | None = None

    def __enter__(self) -> "TrainingProgress":
        """Starts the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the bar."""
        self._bar.stop()

    def start(self, step: int) -> None:
        """Takes the step that a run begins at."""
        self._started, self._first_step = time.monotonic(), step
        self._bar.update(self._task, completed=step)

    def update(self, row: LogRow) -> None:
        """Shows a row."""
        state = (
            f"loss {row.metrics['loss']:.4f} | agreement "
            f"{row.metrics['agreement']:.3f} | {row.tokens_per_second:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=row.step, state=state)
        line = f"step {row.step} of {self._steps} | {state} | {self._left(row.step)}"
        if self._bar.disable or row.evaluation is not None:
            self._print(line)
        if row.evaluation is not None:
            self._last = row
            self._print(f"  held out | {self.summary()}")

    def summary(self) -> str:
        """Returns the last evaluation in one line."""
        if self._last is None or self._last.evaluation is None:
            return "no evaluation was made"
        result = self._last.evaluation
        alphas = " ".join(f"{alpha:.3f}" for alpha in result.alphas)
        return (
            f"step {self._last.step} | loss {result.loss:.4f} | agreement "
            f"{result.agreement:.3f} | 0..4-alpha {alphas} | "
            f"{result.tokens_per_round:.2f} tokens/round"
        )

    def _print(self, line: str) -> None:
        if not self._is_shown:
            return
        if self._bar.disable:
            say(line)
        else:
            self._bar.print(line)

    def _left(self, step: int) -> str:
        done = step - self._first_step
        seconds = (time.monotonic() - self._started) / done * (self._steps - step)
        return f"{seconds / 60:.0f} min left"
