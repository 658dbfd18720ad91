"""A pair's trees on its prompts: timed in parts, recorded, and run for real."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from eagle_jax.config import Method, TreeConfig
from eagle_jax.decoding.rates import decoded_tokens, tokens_per_round
from eagle_jax.decoding.requests import make_requests, round_up_slots
from eagle_jax.errors import InputError, one_line
from eagle_jax.generation.runner import Runner
from eagle_jax.interface import Drafter
from eagle_jax.progress import Progress
from eagle_jax.tree import Topology
from eagle_jax.tuning.costs import StepCosts, num_programs, time_steps
from eagle_jax.tuning.prediction import NODES, Prediction, show, sizes
from eagle_jax.tuning.recording import Recording, all_candidates, record

MOST_TREES = 12
"""The most trees measured in turns: their programs must all be kept meanwhile."""

NO_ROUNDS = "every text ends with its first token; give other prompts"
"""Why nothing can be measured on some prompts."""

_TIMED_STEPS = 12
_TIMED_DEPTH = 4  # Deeper programs take long to compile.
_RECORDED_TOGETHER = 8  # Rows of a batch; recording is not timed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The measurements of one way of decoding.

    Attributes:
        tokens: The decoded tokens of one repetition, without the prefills' own.
        tokens_per_round: The decoded tokens per round of a row.
        seconds: The time of each repetition without prefills, in seconds.
    """

    tokens: int
    tokens_per_round: float
    seconds: tuple[float, ...]

    def speedup(self, plain: "Timing") -> float:
        """Returns the speed over plain decoding's, the median over repetitions."""
        pairs = zip(self.seconds, plain.seconds, strict=True)
        per_second = [theirs / ours for ours, theirs in pairs]
        return statistics.median(per_second) * self.tokens / plain.tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A tree with its figures: measured, or predicted where nothing can be run.

    Attributes:
        prediction: The figures that were expected.
        tokens_per_round: The tokens per round.
        speedup: The speed over plain decoding's.
    """

    prediction: Prediction
    tokens_per_round: float
    speedup: float


def entries(
    predictions: Sequence[Prediction], plain: Timing, timings: Sequence[Timing]
) -> list[Entry]:
    """Returns predictions joined with their measurements, the quickest first."""
    joined = [
        Entry(
            prediction=prediction,
            tokens_per_round=timing.tokens_per_round,
            speedup=timing.speedup(plain),
        )
        for prediction, timing in zip(predictions, timings, strict=True)
    ]
    return sorted(joined, key=lambda entry: -entry.speedup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """Prompts on which ways of decoding are measured.

    Attributes:
        plain: The runner that decodes plainly; others differ in their drafter alone.
        drafter_of: The function from a tree to the drafter that grows it.
        prompts: The prompts' ids.
        repeats: The number of measurements of each way.
        progress: Called to show how far work is, with a label and a total, as
            `eagle_jax.cli.progress.progress` is.
    """

    plain: Runner
    drafter_of: Callable[[TreeConfig | Topology], Drafter]
    prompts: list[list[int]]
    repeats: int
    progress: Progress

    def num_slots(self, depth: int) -> int:
        """Returns the slots of every cache, `S`."""
        longest = max(self.plain.max_length, self.plain.prompt_bucket)
        return round_up_slots(longest, depth)

    def run(self, ranking: Sequence[Prediction], label: str) -> list[Entry]:
        """Runs trees for real, as many at a time as stay compiled.

        Args:
            ranking: The predictions whose trees are run.
            label: The label of the progress.

        Returns:
            The trees with their measurements, the quickest first.
        """
        found: list[Entry] = []
        for start in range(0, len(ranking), MOST_TREES):
            group = ranking[start : start + MOST_TREES]
            with self.progress(label, len(group) + 1 + self.repeats) as done:
                plain, timings = self._measure([entry.tree for entry in group], done)
            found += entries(group, plain, timings)
        return sorted(found, key=lambda entry: -entry.speedup)

    def _measure(
        self,
        trees: Sequence[TreeConfig | Topology],
        report: Callable[[int], None],
    ) -> tuple[Timing, list[Timing]]:
        """Times plain decoding and every tree, batch by batch in turn."""
        drafters = map(self.drafter_of, trees)
        others = [dataclasses.replace(self.plain, drafter=d) for d in drafters]
        runners = [self.plain, *others]
        for done, runner in enumerate(runners, 1):
            runner.warm_up(by_round=False)
            report(done)
        seconds = np.zeros((len(runners), self.repeats))
        lengths: list[list[int]] = [[] for _ in runners]
        rounds = [0] * len(runners)
        size = self.plain.batch_size
        for repeat in range(self.repeats):
            for start in range(0, len(self.prompts), size):
                batch = self.prompts[start : start + size]
                seeds = list(range(start, start + len(batch)))
                for number, runner in enumerate(runners):
                    result = runner.run(batch, seeds)
                    seconds[number, repeat] += result.decode_seconds
                    if repeat == 0:
                        lengths[number] += [len(x.generated_ids) for x in result.rows]
                        rounds[number] += sum(
                            len(x.accept_lengths) for x in result.rows
                        )
            report(len(runners) + repeat + 1)
        if not decoded_tokens(lengths[0]):
            raise InputError(NO_ROUNDS)
        plain, *rest = (
            Timing(
                tokens=decoded_tokens(new_tokens),
                # Plain decoding has no rounds: each of its steps gives a token.
                tokens_per_round=tokens_per_round(new_tokens, num_rounds) or 1.0,
                seconds=tuple(times.tolist()),
            )
            for new_tokens, num_rounds, times in zip(
                lengths, rounds, seconds, strict=True
            )
        )
        return plain, rest


def time_parts(contest: Contest, trees: Sequence[TreeConfig]) -> StepCosts:
    """Times the parts of rounds beside a cache as full as halfway through a text."""
    runner = contest.plain
    most = max(tree.num_nodes for tree in trees)
    nodes = sorted({n for n in NODES if n < most} | {most})
    widths = sorted({tree.width for tree in trees})
    max_depth = max(tree.levels for tree in trees)
    prompt = sorted(contest.prompts, key=len)[len(contest.prompts) // 2]
    # Halfway through the text, but the steps that are timed must fit too.
    missing = max(runner.config.decoding.max_new_tokens // 2 - _TIMED_STEPS, 0)
    filled = (prompt * (1 + -(-missing // len(prompt))))[: len(prompt) + missing]
    requests = make_requests(
        [filled] * runner.batch_size,
        max_new_tokens=_TIMED_STEPS + 1,
        temperature=runner.config.sampling.temperature,
        prompt_bucket=len(filled),
        vocab_size=runner.pair.target.config.vocab_size,
    )
    depth = min(max_depth, _TIMED_DEPTH)
    with contest.progress("timing", num_programs(nodes, widths, depth)) as done:
        return time_steps(
            lambda tree: dataclasses.replace(
                runner.decoder, drafter=contest.drafter_of(tree)
            ),
            runner.pair.params,
            requests,
            num_slots=contest.num_slots(max_depth),
            nodes=nodes,
            widths=widths,
            depth=depth,
            report=done,
        )


def record_texts(
    contest: Contest, trees: Sequence[TreeConfig]
) -> list[dict[int, Recording]]:
    """Records every prompt's text once, for all trees.

    Returns:
        Each prompt's recordings by width.

    Raises:
        InputError: If no text has a second token.
    """
    widths = sorted({tree.width for tree in trees})
    depth = max(tree.levels for tree in trees)
    # A wide tree need not expand a chain's nodes: chains are recorded apart.
    drafters = {
        width: contest.drafter_of(all_candidates(depth, width))
        for width in sorted({widths[0], widths[-1]})
    }
    size = min(_RECORDED_TOGETHER, len(contest.prompts))
    recorded: list[dict[int, Recording]] = []
    with contest.progress("recording", len(contest.prompts)) as done:
        for start in range(0, len(contest.prompts), size):
            done(start)
            numbers = range(start, start + size)
            recorded += _record_batch(contest, drafters, widths, numbers)
        recorded = recorded[: len(contest.prompts)]
        done(len(recorded))
    if not any(len(text[widths[0]].places) for text in recorded):
        raise InputError(NO_ROUNDS)
    return recorded


def distance(best: Entry, swept: Sequence[Entry]) -> str:
    """Returns how far the recommendation is from the best tree of a sweep.

    Args:
        best: The quickest of the finalists.
        swept: All trees of the grid, measured once more, the quickest first.
    """
    first, tree = swept[0], best.prediction.tree
    again = next(entry for entry in swept if entry.prediction.tree == tree)
    lost = 100 * (1 - again.speedup / first.speedup)
    return (
        f"sweep of {len(swept)} trees: the best is {show(first.prediction.tree)} at "
        f"{first.speedup:.2f}; {show(tree)}, the best finalist, measures "
        f"{again.speedup:.2f}, {lost:.1f}% less"
    )


def settings_file(
    best: Entry,
    *,
    method: Method,
    temperature: float,
    batch_size: int,
    dtype: str,
    choices: str = "",
    how: str = "measured",
    draft_vocabulary: str | None = None,
    comments: Sequence[str],
) -> str:
    """Returns a settings file of `GenerateConfig`.

    Args:
        best: The quickest tree; plain decoding is recommended if that is quicker.
        method: The method that drafts.
        temperature: The temperature that was tuned for: above 0 the tree is that of
            sampled text.
        batch_size: The number of rows that was tuned for, `B`.
        dtype: The type as it was given; "auto" is left out of the file.
        choices: The file that holds the paths of a static tree.
        how: How its figures were found, as the file says it.
        draft_vocabulary: See `DecodingConfig.draft_vocabulary`.
        comments: Lines that say where the figures come from.
    """
    tree, pays = best.prediction.tree, best.speedup > 1
    figures = (
        f"{how}: {best.tokens_per_round:.2f} tokens per round, {best.speedup:.2f} "
        "times the speed of plain decoding"
    )
    if not pays:
        figures = f"no tree pays; the best, {show(tree, method)}: {figures}"
    lines = [f"# {one_line(line)}".rstrip() for line in (*comments, figures)]
    if pays:
        table = "sampled_tree" if temperature > 0 else "tree"
        lines += ["", f"[{table}]"]
        if isinstance(tree, Topology):
            lines.append(f"choices = {_quoted(choices)}")
        else:
            lines += [f"{name} = {getattr(tree, name)}" for name in sizes(method)]
            if tree.calibration is not None:
                lines.append(f"calibration = {_quoted(tree.calibration)}")
    chosen = method if pays else "autoregressive"
    lines += ["", "[decoding]", f'method = "{chosen}"', f"batch_size = {batch_size}"]
    if dtype != "auto":
        lines.append(f'dtype = "{dtype}"')
    if draft_vocabulary is not None and pays:
        lines.append(f"draft_vocabulary = {_quoted(draft_vocabulary)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Returns a string of TOML, which has no pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False)


def _record_batch(
    contest: Contest,
    drafters: dict[int, Drafter],
    widths: Sequence[int],
    numbers: range,
) -> list[dict[int, Recording]]:
    """Records the prompts of these numbers; those after the last are made up."""
    runner = contest.plain
    prompts = contest.prompts[numbers.start : numbers.stop]
    missing = len(numbers) - len(prompts)
    most = runner.config.decoding.max_new_tokens
    return record(
        runner.decoder,
        drafters,
        runner.pair.params,
        make_requests(
            # All batches share one compilation.
            prompts + [[0]] * missing,
            max_new_tokens=[most] * len(prompts) + [1] * missing,
            stop_tokens=runner.pair.stop_tokens,
            temperature=runner.config.sampling.temperature,
            seeds=list(numbers),
            prompt_bucket=runner.prompt_bucket,
            vocab_size=runner.pair.target.config.vocab_size,
        ),
        widths=widths,
        num_slots=contest.num_slots(drafters[widths[-1]].depth),
    )
