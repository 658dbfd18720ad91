"""Decodes all prompts of a command, and shows their texts as they are decided."""

import collections
import dataclasses
from typing import Any

from rich.console import Console

from eagle_jax.cli import results
from eagle_jax.cli.progress import progress
from eagle_jax.cli.tree_view import draw_tree
from eagle_jax.decoding.rates import decoded_tokens, tokens_per_round
from eagle_jax.engine import Engine, Pair, Text
from eagle_jax.engine.programs import PROGRAMS


@dataclasses.dataclass(kw_only=True)
class Session:
    """The decoding of texts, in order.

    Texts that are watched are shown as they are decided; of those that keep their
    rounds, records hold the trees.

    Attributes:
        engine: What decodes; it is empty.
        prompts: The prompts as texts.
        texts: What is to be written after each.
        show_tree: Whether to draw the last round's tree.
        is_chat: Whether texts answer prompts, instead of going on from them.
        is_silent: Whether to show no text, for a run that only takes the time.
        runs: A record per decoded text, see `results.run_record`.
        decode_seconds: The time of decoding without prefills and compilation, in
            seconds.
        compile_seconds: The time of compiling programs, in seconds.
    """

    engine: Engine
    prompts: list[str]
    texts: list[Text]
    show_tree: bool = False
    is_chat: bool = False
    is_silent: bool = False
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    _headed: int = dataclasses.field(default=-1, init=False)

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of the texts so far."""
        return [run["generated_ids"] for run in self.runs]

    @property
    def speed(self) -> float | None:
        """The tokens per second, a text's first left out; `None` where none is left."""
        decoded = decoded_tokens([*map(len, self.ids)])
        return decoded / self.decode_seconds if decoded else None

    def again(self, pair: Pair | None = None) -> "Session":
        """Returns a silent one that decodes the same, by another pair if any."""
        engine, texts = self.engine, []
        pair = pair or engine.pair
        for text in self.texts:
            again = pair.text(text.prompt_ids, text.request, index=text.index)
            # The times that are taken are of the same rounds.
            again.keeps_rounds = text.keeps_rounds or text.is_watched
            texts.append(again)
        engine = pair.engine(batch_size=engine.batch_size, max_length=engine.max_length)
        return Session(engine=engine, prompts=self.prompts, texts=texts, is_silent=True)

    def warm_up(self) -> None:
        """Compiles what one batch needs; a queue compiles what it meets."""
        if len(self.texts) <= self.engine.batch_size or self.engine.batch_size == 1:
            before = PROGRAMS.compile_seconds
            self.engine.warm_up(self.texts)
            self.compile_seconds += PROGRAMS.compile_seconds - before

    def decode_all(self, *, has_progress: bool = True) -> bool:
        """Decodes every text; returns whether nothing interrupted it."""
        engine, texts, total = self.engine, self.texts, len(self.texts)
        for text in texts:
            engine.add(text, name=f"prompt {text.index}")
        is_shown = has_progress and total > engine.batch_size
        before, is_whole = PROGRAMS.compile_seconds, True
        with progress("decoding", total, pause=0, is_shown=is_shown) as update:
            try:
                for text in engine.run():
                    if text.is_watched:
                        self._show_piece(text)
                    while len(self.runs) < total and texts[len(self.runs)].has_ended:
                        self._keep(texts[len(self.runs)])
                    update(len(self.runs))
            except KeyboardInterrupt:  # What nobody looked at is lost.
                is_whole = False
                for text in texts[len(self.runs) :]:
                    if text.token_ids:
                        self._keep(text)
        self.compile_seconds += PROGRAMS.compile_seconds - before
        return is_whole

    def totals(self) -> dict[str, Any]:
        """Returns sums over the texts so far."""
        lengths = [*map(len, self.ids)]
        rounds = sum(run["rounds"] for run in self.runs)
        trees = collections.Counter[str]()
        for run in self.runs:
            trees.update(run["rounds_by_tree"])
        return {
            "tokens": sum(lengths),
            "rounds": rounds,
            "rounds_by_tree": dict(trees),
            "tokens_per_round": tokens_per_round(lengths, rounds),
            "tokens_per_second": self.speed,
            "compile_seconds": self.compile_seconds,
        }

    def _keep(self, text: Text) -> None:
        """Records and shows a text."""
        self.decode_seconds += text.decode_seconds
        prompt = self.prompts[text.index]
        self.runs.append(results.run_record(text, prompt=prompt))
        if text.is_watched:
            print()
        elif not self.is_silent:
            self._show_head(text)
            print(self.runs[-1]["text"])
        if self.show_tree and text.rounds:
            tree = results.tree_record(text.rounds[-1][0])
            drawn = draw_tree(tree, self.engine.pair.tokenizer)
            Console(highlight=False).print(drawn)

    def _show_piece(self, text: Text) -> None:
        if self._headed != text.index:
            self._headed = text.index
            self._show_head(text)
        print(text.piece(), end="", flush=True)

    def _show_head(self, text: Text) -> None:
        """Prints the prompt that a text goes on from, or which of several it is."""
        number, is_single = text.index, len(self.prompts) == 1
        if not is_single:
            print(f"--- {number}: {self.prompts[number]!r}")
        if text.is_watched or (is_single and not self.is_chat):
            end = "\n" * self.is_chat
            print(self.prompts[number], end=end, flush=True)
