"""A pair's trees on its prompts: run in turns, and the slower half dropped."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle_jax.decoding.rates import decoded_tokens, tokens_per_round
from eagle_jax.errors import InputError, one_line
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.runner import Runner
from eagle_jax.interface import Drafter
from eagle_jax.methods import PLAIN
from eagle_jax.progress import Progress
from eagle_jax.tuning.trees import show, sizes

Tree = Any
"""The settings of a method."""

MOST_TREES = 12
"""The most trees measured in turns: their programs must all be kept meanwhile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The measurements of one way of decoding.

    Attributes:
        tokens: The decoded tokens of one measurement, without the prefills' own.
        tokens_per_round: The decoded tokens per round of a row.
        seconds: The time of each measurement without prefills, in seconds.
    """

    tokens: int
    tokens_per_round: float
    seconds: tuple[float, ...]

    def speedup(self, plain: "Timing") -> float:
        """Returns the speed over plain decoding's, the median over measurements."""
        # Plain decoding is measured on after a tree was dropped.
        pairs = zip(self.seconds, plain.seconds, strict=False)
        per_second = [theirs / ours for ours, theirs in pairs]
        return statistics.median(per_second) * self.tokens / plain.tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A tree with its figures.

    Attributes:
        tree: The tree.
        tokens_per_round: The tokens per round.
        speedup: The speed over plain decoding's.
        measurements: How often it was measured: less often if it was dropped.
    """

    tree: Tree
    tokens_per_round: float
    speedup: float
    measurements: int


def halve(
    trees: Sequence[Tree],
    measure: Callable[[Sequence[Tree | None]], Mapping[Tree | None, Timing]],
) -> list[Trial]:
    """Measures trees, drops the slower half, and again until two or one are measured.

    Args:
        trees: The trees, which all differ.
        measure: The function that measures trees, and plain decoding where one is
            `None`, once more, and returns all their measurements so far.

    Returns:
        The trees, those that were measured longest first, the quickest of these first.
    """
    dropped: list[Trial] = []
    left = list(trees)
    while True:
        timings = measure([None, *left])
        plain = timings[None]
        trials = [
            Trial(
                tree=tree,
                tokens_per_round=timings[tree].tokens_per_round,
                speedup=timings[tree].speedup(plain),
                measurements=len(timings[tree].seconds),
            )
            for tree in left
        ]
        trials.sort(key=lambda trial: -trial.speedup)
        if len(left) <= 2:
            return trials + dropped
        kept = -(-len(left) // 2)
        left = [trial.tree for trial in trials[:kept]]
        dropped = trials[kept:] + dropped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """Prompts on which ways of decoding are measured.

    Attributes:
        plain: The runner that decodes plainly; others differ in their drafter alone.
        drafter_of: The function from a tree to the drafter that grows it.
        prompts: The prompts' ids.
        repeats: The number of measurements of each tree before some are dropped.
        progress: Called to show how far work is, with a label and a total, as
            `eagle_jax.cli.progress.progress` is.
    """

    plain: Runner
    drafter_of: Callable[[Tree], Drafter | None]
    prompts: list[list[int]]
    repeats: int
    progress: Progress

    def run(self, trees: Sequence[Tree]) -> list[Trial]:
        """Runs trees for real, see `halve`.

        Args:
            trees: The trees, `MOST_TREES` at most, which all differ.

        Raises:
            InputError: If no text has a second token.
        """
        runners: dict[Tree | None, Runner] = {None: self.plain}
        for tree in trees:
            drafter = self.drafter_of(tree)
            runners[tree] = dataclasses.replace(self.plain, drafter=drafter)
        with self.progress("compiling", len(runners)) as done:
            for number, runner in enumerate(runners.values(), 1):
                runner.warm_up(by_round=False)
                done(number)
        timings: dict[Tree | None, Timing] = {}

        def measure(ways: Sequence[Tree | None]) -> Mapping[Tree | None, Timing]:
            with self.progress(f"{len(ways) - 1} trees", self.repeats) as done:
                for repeat in range(self.repeats):
                    for way, timing in self._measure(ways, runners).items():
                        before = timings[way].seconds if way in timings else ()
                        timings[way] = dataclasses.replace(
                            timing, seconds=before + timing.seconds
                        )
                    done(repeat + 1)
            return timings

        return halve(trees, measure)

    def _measure(
        self,
        ways: Sequence[Tree | None],
        runners: Mapping[Tree | None, Runner],
    ) -> dict[Tree | None, Timing]:
        """Decodes all prompts once with each runner, batch by batch in turns."""
        seconds = dict.fromkeys(ways, 0.0)
        rounds = dict.fromkeys(ways, 0)
        lengths: dict[Tree | None, list[int]] = {way: [] for way in ways}
        size = self.plain.batch_size
        for start in range(0, len(self.prompts), size):
            batch = self.prompts[start : start + size]
            seeds = list(range(start, start + len(batch)))
            for way in ways:
                result = runners[way].run(batch, seeds)
                seconds[way] += result.decode_seconds
                lengths[way] += [len(row.generated_ids) for row in result.rows]
                rounds[way] += sum(len(row.accept_lengths) for row in result.rows)
        if not decoded_tokens(lengths[None]):
            raise InputError("every text ends with its first token; give other prompts")
        return {
            way: Timing(
                tokens=decoded_tokens(lengths[way]),
                # Plain decoding has no rounds: each of its steps gives a token.
                tokens_per_round=tokens_per_round(lengths[way], rounds[way]) or 1.0,
                seconds=(seconds[way],),
            )
            for way in ways
        }


def settings_file(best: Trial, config: GenerateConfig, comments: Sequence[str]) -> str:
    """Returns a settings file of `GenerateConfig`.

    Args:
        best: The quickest tree; plain decoding is recommended if that is quicker.
        config: The settings that were tuned for: above temperature 0 the tree is that
            of sampled text, and a type of "auto" is left out of the file.
        comments: Lines that say where the figures come from.
    """
    tree, pays, decoding = best.tree, best.speedup > 1, config.decoding
    figures = (
        f"measured: {best.tokens_per_round:.2f} tokens per round, {best.speedup:.2f} "
        "times the speed of plain decoding"
    )
    if not pays:
        figures = f"no tree pays; the best, {show(tree, config.method)}: {figures}"
    lines = [f"# {one_line(line)}".rstrip() for line in (*comments, figures)]
    if pays:
        table = "sampled_tree" if config.sampling.temperature > 0 else "tree"
        lines += ["", f"[{table}]"]
        names = sizes(config.method)
        lines += [f"{name} = {getattr(tree, name)}" for name in names]
        if getattr(tree, "calibration", None) is not None:
            lines.append(f"calibration = {_quoted(tree.calibration)}")
    chosen = decoding.method if pays else PLAIN.name
    lines += ["", "[decoding]", f'method = "{chosen}"']
    lines.append(f"batch_size = {decoding.batch_size}")
    if decoding.dtype != "auto":
        lines.append(f'dtype = "{decoding.dtype}"')
    if decoding.draft_vocabulary is not None and pays:
        lines.append(f"draft_vocabulary = {_quoted(decoding.draft_vocabulary)}")
    return "\n".join(lines) + "\n"


def _quoted(value: str | int) -> str:
    """Returns a value of TOML, whose strings have no pairs of surrogates."""
    return json.dumps(value, ensure_ascii=False)
