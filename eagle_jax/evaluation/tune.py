"""Trials of settings: run in turns on prompts, and the slower half dropped."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle_jax.decoding.rates import decoded_tokens, tokens_per_round
from eagle_jax.engine import Engine, Pair, PairConfig, Text
from eagle_jax.engine.calls import empty_engine_for
from eagle_jax.errors import InputError, one_line
from eagle_jax.methods import METHODS, PLAIN, Method
from eagle_jax.reporting import Progress

Tree = Any
"""The settings of a method."""

MOST_TREES = 12
"""The most trees measured in turns: their programs must all be kept meanwhile."""

_DEFAULT = METHODS[PairConfig.method]


def parse_grid(text: str, method: Method = _DEFAULT) -> list[Tree]:
    """Reads settings of a method, written as `show` writes them, between blanks.

    >>> [show(tree) for tree in parse_grid("8/7/1 60/6/10")]
    ['8/7/1', '60/6/10']

    Raises:
        InputError: If there are none or too many, or some are written otherwise or
            draft nothing.
    """
    names, trees = sizes(method), dict[Tree, None]()
    for part in text.split():
        numbers = part.split("/")
        is_known = all(n.isdecimal() and len(n) <= 10 for n in numbers)
        if not is_known or len(numbers) != len(names):
            raise InputError(f"`grid` {part[:99]!r} must be {'/'.join(names)}")
        values = dict(zip(names, map(int, numbers), strict=True))
        if 0 in values.values() or values.get("num_nodes") == 1:
            raise InputError(f"`grid` {part} drafts nothing; give larger numbers")
        trees[method.settings(**values)] = None
    if not 1 <= len(trees) <= MOST_TREES:
        raise InputError(
            f"`grid` has {len(trees)} settings to run in turns; give 1 to {MOST_TREES}"
        )
    return list(trees)


def sizes(method: Method) -> list[str]:
    """Returns the names of the numbers that a method reads, those of a tree first."""
    default = method.settings()
    return [name for name in method.own_settings if type(getattr(default, name)) is int]


def show(tree: Tree, method: Method = _DEFAULT) -> str:
    """Returns a method's `sizes` as `parse_grid` reads them."""
    return "/".join(str(getattr(tree, name)) for name in sizes(method))


@dataclasses.dataclass(kw_only=True, eq=False)
class Trial:
    """A tree and its measurements.

    Attributes:
        tree: The tree; `None` for plain decoding.
        plain: The measurements of plain decoding, which go on after a tree was dropped.
        tokens: The decoded tokens of one measurement, without the prefills' own.
        tokens_per_round: The decoded tokens per round of a row.
        seconds: The time of each measurement without prefills, in seconds.
    """

    tree: Tree
    plain: "Trial | None" = None
    tokens: int = 0
    tokens_per_round: float = 1.0
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def speedup(self) -> float:
        """The speed over plain decoding's, the median over measurements."""
        plain = self.plain or self
        pairs = zip(self.seconds, plain.seconds, strict=False)
        per_second = [theirs / ours for ours, theirs in pairs]
        return statistics.median(per_second) * self.tokens / plain.tokens

    def take(self, texts: Sequence[Text]) -> None:
        """Takes in one measurement of all texts.

        Raises:
            InputError: If no text has a second token.
        """
        lengths = [len(text.token_ids) for text in texts]
        rounds = sum(len(text.accept_lengths) for text in texts)
        if not (tokens := decoded_tokens(lengths)):
            raise InputError(
                "every text ends with its first token; give other prompts, or `chat` "
                "for a chat model"
            )
        self.tokens = tokens
        # Plain decoding has no rounds: each of its steps gives a token.
        self.tokens_per_round = tokens_per_round(lengths, rounds) or 1.0
        self.seconds.append(sum(text.decode_seconds for text in texts))


def halve(
    trials: Sequence[Trial], measure: Callable[[Sequence[Trial]], None]
) -> list[Trial]:
    """Measures trees, drops the slower half, and again until two or one are measured.

    Args:
        trials: The trees, which all differ.
        measure: The function that measures trees, and plain decoding, once more.

    Returns:
        The trees, those that were measured longest first, the quickest of these first.
    """
    measure(trials)
    found = sorted(trials, key=lambda trial: -trial.speedup)
    if len(found) <= 2:
        return found
    kept = -(-len(found) // 2)
    return halve(found[:kept], measure) + found[kept:]


def run_trials(
    pairs: Mapping[Tree | None, Pair],
    prompts: Sequence[list[int]],
    repeats: int,
    progress: Progress,
    *,
    batch_size: int,
) -> list[Trial]:
    """Runs trees for real, see `halve`.

    Args:
        pairs: What decodes with each tree, and plainly for `None`; `MOST_TREES` trees
            at most.
        prompts: The prompts' ids.
        repeats: The number of measurements of each tree before some are dropped.
        progress: Called to show how far work is, with a label and a total, as
            `eagle_jax.cli.progress.progress` is.
        batch_size: The number of texts decoded together.

    Raises:
        InputError: If no text has a second token.
    """
    texts = {way: pair.texts(prompts) for way, pair in pairs.items()}
    shape = empty_engine_for(pairs[None], texts[None], batch_size)
    size, length = shape.batch_size, shape.max_length

    def engine(way: Tree | None) -> Engine:
        return pairs[way].engine(batch_size=size, max_length=length)

    with progress("compiling", len(pairs)) as done:
        for number, way in enumerate(pairs, 1):
            engine(way).warm_up(texts[way])
            done(number)
    plain = Trial(tree=None)

    def measure(left: Sequence[Trial]) -> None:
        trials = [plain, *left]
        with progress(f"{len(left)} trees", repeats) as done:
            for repeat in range(repeats):
                for start in range(0, len(prompts), size):
                    for trial in trials:
                        batch = texts[trial.tree][start : start + size]
                        engine(trial.tree).write(batch)
                for trial in trials:
                    trial.take(texts[trial.tree])
                done(repeat + 1)

    trees = [tree for tree in pairs if tree is not None]
    return halve([Trial(tree=tree, plain=plain) for tree in trees], measure)


def verdict(best: Trial, method: Method) -> str:
    """Returns in one line what the quickest tree is worth, and whether it pays."""
    found = (
        f"{show(best.tree, method)}: {best.tokens_per_round:.2f} tokens per round, "
        f"{best.speedup:.2f} times the speed of plain decoding"
    )
    if best.speedup > 1:
        return found
    return f'no tree pays here; the best, {found}; use method = "{PLAIN.name}"'


def settings_file(best: Trial, config: PairConfig, comments: Sequence[str]) -> str:
    """Returns a settings file of `PairConfig`.

    Args:
        best: The quickest tree; plain decoding is recommended if that is quicker.
        config: The settings that were tuned for; a type of "auto" is left out of the
            file.
        comments: Lines that say where the figures come from.
    """
    tree, pays = best.tree, best.speedup > 1
    comments = (*comments, verdict(best, config.method_row))
    lines = [f"# {one_line(line)}".rstrip() for line in comments]
    tables: dict[str, dict[str, Any]] = {}
    if pays:
        own = {name: getattr(tree, name) for name in sizes(config.method_row)}
        own["calibration"] = getattr(tree, "calibration", None)
        tables["tree"] = own
    tables["pair"] = {
        "method": config.method if pays else PLAIN.name,
        "batch_size": config.batch_size,
        "dtype": None if config.dtype == "auto" else config.dtype,
        "draft_vocabulary": config.draft_vocabulary if pays else None,
    }
    for name, values in tables.items():
        lines += ["", f"[{name}]"]
        for key, value in values.items():
            if value is not None:
                # A string of TOML has no pairs of surrogates.
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
