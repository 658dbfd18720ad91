"""Decodes all prompts of a command, and shows their texts as they are decided."""

import dataclasses
from typing import Any

import jax
from rich.console import Console

from eagle_jax.cli import results
from eagle_jax.cli.progress import progress
from eagle_jax.cli.tree_view import draw_tree
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import StopReason
from eagle_jax.generation import text
from eagle_jax.generation.runner import Observer, Runner, Snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The settings of what a run shows and keeps.

    Attributes:
        stream: Whether to show the text as it is decided; one row per batch.
        trace: Whether to keep every round's tree.
        show_tree: Whether to draw the last round's tree.
        is_silent: Whether to show nothing.
        force_rounds: Whether to drive rounds from Python although nothing looks at
            them, as the run does that this one is compared with.
    """

    stream: bool = False
    trace: bool = False
    show_tree: bool = False
    is_silent: bool = False
    force_rounds: bool = False

    @property
    def by_round(self) -> bool:
        """Whether rounds are driven from Python."""
        return self.stream or self.trace or self.show_tree or self.force_rounds


class Session:
    """The decoding of prompts in batches, in order.

    Attributes:
        runs: A record per decoded prompt, see `results.run_record`.
        decode_seconds: The time of decoding without prefills and compilation, in
            seconds.
        compile_seconds: The time of compiling programs that no warm-up had compiled, as
            for larger caches, in seconds.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: list[str],
        encoded: list[list[int]],
        view: View,
    ) -> None:
        """Prepares a session.

        Args:
            runner: The runner that decodes a batch.
            prompts: The prompts as texts.
            encoded: The prompts as ids.
            view: The settings of what is shown and kept.
        """
        self.runs: list[dict[str, Any]] = []
        self.decode_seconds = self.compile_seconds = 0.0
        self._runner = runner
        self._prompts = prompts
        self._encoded = encoded
        self._view = view
        self._tokenizer = runner.pair.tokenizer

    def decode_all(self) -> bool:
        """Decodes every prompt; returns whether nothing interrupted it."""
        total, size = len(self._prompts), self._runner.batch_size
        with progress("decoding", total, pause=0, is_shown=total > size) as update:
            for start in range(0, total, size):
                batch = range(start, min(start + size, total))
                try:
                    is_cut_short = self._decode_batch(batch)
                except KeyboardInterrupt:  # Not between rounds: this batch is lost.
                    is_cut_short = True
                update(len(self.runs))
                if is_cut_short:
                    return False
        return True

    def _decode_batch(self, numbers: range) -> bool:
        """Decodes and shows some prompts; returns whether Ctrl-C cut it short."""
        encoded = [self._encoded[number] for number in numbers]
        seeds = [self._runner.config.sampling.seed + number for number in numbers]
        trees: list[list[dict[str, Any]]] = [[] for _ in numbers]
        last: dict[int, Round] = {}
        self._show_head(numbers[0])
        observer = self._observer(encoded[0], trees, last)
        result = self._runner.run(
            encoded, seeds, observer if self._view.by_round else None
        )
        self.decode_seconds += result.decode_seconds
        self.compile_seconds += result.compile_seconds
        for row, number in enumerate(numbers):
            decoded = result.rows[row]
            generated = text.continuation(
                self._tokenizer, decoded.prompt_ids, decoded.generated_ids
            )
            record = results.run_record(
                decoded, prompt=self._prompts[number], text=generated, seed=seeds[row]
            )
            if self._view.trace:
                record["trees"] = trees[row]
            self.runs.append(record)
            if row > 0:
                self._show_head(number)
            if not self._view.is_silent:
                print("" if self._view.stream else generated)
            if self._view.show_tree and row in last:
                drawn = draw_tree(last[row], row, self._tokenizer)
                Console(highlight=False).print(drawn)
        return result.was_interrupted

    def _observer(
        self,
        first_prompt: list[int],
        trees: list[list[dict[str, Any]]],
        last: dict[int, Round],
    ) -> Observer:
        """Returns a function that streams and traces rounds, and keeps the last."""
        stream = text.TextStream(self._tokenizer, first_prompt)

        def observe(snapshot: Snapshot) -> None:
            if self._view.stream:
                row = snapshot.rows[0]
                is_last = row.stop_reason != StopReason.RUNNING
                new = stream.update(row.generated_ids, is_last=is_last)
                print(new, end="", flush=True)
            if snapshot.round is None:
                return
            count = jax.device_get(snapshot.round.count)
            for row in range(len(trees)):
                if count[row]:
                    last[row] = snapshot.round
                    if self._view.trace:
                        trees[row].append(results.tree_record(snapshot.round, row))

        return observe

    def _show_head(self, number: int) -> None:
        """Prints a heading that tells several texts apart."""
        if len(self._prompts) > 1 and not self._view.is_silent:
            print(f"--- {number}: {self._prompts[number]!r}")
