"""Decodes all prompts of a command, and shows their texts as they are decided."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from eagle_jax.cli import results
from eagle_jax.cli.progress import progress
from eagle_jax.cli.tree_view import draw_tree
from eagle_jax.decoding.rates import decoded_tokens, tokens_per_round
from eagle_jax.decoding.state import StopReason
from eagle_jax.engine.batches import decode_all, is_queue
from eagle_jax.engine.request import Asked
from eagle_jax.engine.results import Generation
from eagle_jax.engine.rows import Row
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.stopping import StoppingText


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The settings of what a run shows and keeps.

    Attributes:
        stream: Whether to show the text as it is decided, after its prompt; one row
            per batch.
        trace: Whether to keep every round's tree.
        show_tree: Whether to draw the last round's tree.
        is_silent: Whether to show no text, for a run that only takes the time.
        is_chat: Whether texts answer prompts, instead of going on from them.
    """

    stream: bool = False
    trace: bool = False
    show_tree: bool = False
    is_silent: bool = False
    is_chat: bool = False

    @property
    def by_round(self) -> bool:
        """Whether rounds are driven from Python."""
        return self.stream or self.trace or self.show_tree


class Session:
    """The decoding of prompts in batches, in order.

    Attributes:
        runs: A record per decoded prompt, see `results.run_record`.
        decode_seconds: The time of decoding without prefills and compilation, in
            seconds.
        compile_seconds: The time of compiling programs, in seconds.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: list[str],
        asked: list[Asked],
        view: View,
    ) -> None:
        """Prepares a session.

        Args:
            runner: The runner that decodes a batch.
            prompts: The prompts as texts.
            asked: The prompts as ids, and what is asked for after each.
            view: The settings of what is shown and kept.
        """
        self.runs: list[dict[str, Any]] = []
        self.decode_seconds = self.compile_seconds = 0.0
        self._runner = runner
        self._prompts = prompts
        self._encoded = [ids for ids, _ in asked]
        self._settings = [one for _, one in asked]
        self._view = view
        self._was_interrupted = False
        self._tokenizer = runner.pair.tokenizer

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of the texts so far."""
        return [run["generated_ids"] for run in self.runs]

    @property
    def speed(self) -> float | None:
        """The tokens per second, a text's first left out; `None` where none is left."""
        decoded = decoded_tokens([*map(len, self.ids)])
        return decoded / self.decode_seconds if decoded else None

    def again(self, runner: Runner | None = None) -> "Session":
        """Returns a silent one that decodes the same, by another runner if any."""
        # Trees are kept between the times that are taken, which are of the same rounds.
        view = View(is_silent=True, trace=self._view.by_round)
        asked = [*zip(self._encoded, self._settings, strict=True)]
        return Session(runner or self._runner, self._prompts, asked, view)

    def warm_up(self) -> None:
        """Compiles what every batch needs; a queue compiles what it meets."""
        if self._view.by_round or not is_queue(self._runner, self._encoded):
            seconds = self._runner.warm_up(by_round=self._view.by_round)
            self.compile_seconds += seconds

    def decode_all(self, *, has_progress: bool = True) -> bool:
        """Decodes every prompt; returns whether nothing interrupted it."""
        total = len(self._prompts)
        is_shown = has_progress and total > self._runner.batch_size
        with progress("decoding", total, pause=0, is_shown=is_shown) as update:
            decode = self._watch_all if self._view.by_round else self._run_all
            try:
                for _ in decode():
                    update(len(self.runs))
            except KeyboardInterrupt:  # What is not finished is lost.
                return False
        return not self._was_interrupted

    def totals(self) -> dict[str, Any]:
        """Returns sums over the texts so far."""
        lengths = [*map(len, self.ids)]
        rounds = sum(run["rounds"] for run in self.runs)
        return {
            "tokens": sum(lengths),
            "rounds": rounds,
            "tokens_per_round": tokens_per_round(lengths, rounds),
            "tokens_per_second": self.speed,
            "compile_seconds": self.compile_seconds,
        }

    def _run_all(self) -> Iterator[None]:
        """Decodes without a look between rounds; texts are shown in order."""
        runner, before = self._runner, self._runner.programs.compile_seconds
        try:
            for served in decode_all(runner, self._encoded, self._settings):
                self.decode_seconds += served.decode_seconds
                done = Generation.of(self._tokenizer, served)
                self._keep(served.key, served.row, done.text)
                yield
        finally:
            self.compile_seconds += runner.programs.compile_seconds - before

    def _watch_all(self) -> Iterator[None]:
        """Decodes batch by batch, and looks at every round."""
        total, size = len(self._prompts), self._runner.batch_size
        for start in range(0, total, size):
            self._watch_batch(range(start, min(start + size, total)))
            yield
            if self._was_interrupted:
                return

    def _watch_batch(self, numbers: range) -> None:
        runner, view = self._runner, self._view
        trees: dict[int, list[Any]] = {row: [] for row in range(len(numbers))}
        encoded = [self._encoded[number] for number in numbers]
        asked = [self._settings[number] for number in numbers]
        texts = [
            StoppingText(self._tokenizer, ids, one)
            for ids, one in zip(encoded, asked, strict=True)
        ]
        compiled, rows = runner.programs.compile_seconds, []
        started = None  # The prefill's time is no part of decoding.
        try:
            for found, done in runner.rounds(encoded, asked):
                seconds = 0.0 if started is None else runner.clock() - started
                self.decode_seconds += seconds
                rows = [text.take(row) for text, row in zip(texts, found, strict=False)]
                if view.stream:
                    if started is None:
                        self._show_head(numbers[0])
                    print(texts[0].new, end="", flush=True)
                if done is not None and (view.trace or view.show_tree):
                    for row in np.flatnonzero(done.count).tolist():
                        tree = results.tree_record(done, row)
                        trees[row].append(tree | {"seconds": seconds})
                started = runner.clock()
                if all(row.stop_reason != StopReason.RUNNING for row in rows):
                    break
        except KeyboardInterrupt:
            if not rows:
                raise
            self._was_interrupted = True
        self.compile_seconds += runner.programs.compile_seconds - compiled
        for row, number in enumerate(numbers):
            self._keep(number, rows[row], texts[row].text)
            if view.trace:
                self.runs[-1]["trees"] = trees[row]
            if view.show_tree and trees[row]:
                drawn = draw_tree(trees[row][-1], self._tokenizer)
                Console(highlight=False).print(drawn)

    def _keep(self, number: int, row: Row, generated: str) -> None:
        """Records and shows a text."""
        prompt, settings = self._prompts[number], self._settings[number]
        self.runs.append(
            results.run_record(row, prompt=prompt, text=generated, settings=settings)
        )
        if self._view.stream:
            print()
        elif not self._view.is_silent:
            self._show_head(number)
            print(generated)

    def _show_head(self, number: int) -> None:
        """Prints the prompt that a text goes on from, or which of several it is."""
        if len(self._prompts) > 1:
            print(f"--- {number}: {self._prompts[number]!r}")
        is_single = len(self._prompts) == 1 and not self._view.is_chat
        if self._view.stream or is_single:
            end = "\n" * self._view.is_chat
            print(self._prompts[number], end=end, flush=True)
