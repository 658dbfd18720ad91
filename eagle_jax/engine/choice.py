"""Which tree pays: chosen between stretches of rounds, by what earlier ones took.

All here is a function of counts and times. Every tree gives the same text, so a wrong
choice costs time alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TRIAL = 8
"""The rounds of a trial."""

STRETCH = 32
"""The most rounds between two choices."""

# What trials may take of all time, and where a text has changed its kind.
_SHARE, _CHANGED_SHARE = 0.02, 0.1
# The row-rounds, and the rounds, after which figures count half.
_YIELD_HALF, _COST_HALF = 256.0, 512.0
# A tree's tokens per round fell or rose by so much, over so many of one row: the
# figures of others are old.
_CHANGE, _LEAST_ROUNDS = 1.4, 32
# An estimate must promise so much more before anything is compiled for it.
_MARGIN = 1.05
# Of the time that an estimate promises to save, so much is believed; that the root
# alone brings one token is known.
_BELIEVED, _ROOT_BELIEVED = 0.5, 0.75
# What a node of each row adds to a round's cost at most: CPUs have 0.14 of a token.
_STEEP = 0.15
# Of several rows some wait for the texts of others, by so much more for each level of a
# tree. Measured: 0.05, as 0.88 of 16 rows held a text with 3 levels, 0.74 with 7.
_WAITING = 0.025
# The most nodes of all rows together that are begun with.
_FIRST_NODES = 64
_MORE_TOKENS = 1.25


class Stretch(NamedTuple):
    """What some rounds by one tree took and brought.

    Attributes:
        rounds: The rounds.
        row_rounds: The rounds of all rows together in which a text was written.
        tokens: The tokens that they brought.
        seconds: The time that they took, in seconds.
    """

    rounds: int = 0
    row_rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The trees to choose among.

    Attributes:
        nodes: The nodes of each, root included, ascending; the first drafts nothing.
        depths: The depth of each.
        start: The place of the tree that begins, of one row; of many, a smaller one.
    """

    nodes: Sequence[int]
    depths: Sequence[int]
    start: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What is known of the trees of a ladder.

    Attributes:
        costs: Rounds and their seconds by tree and rows, older ones counted less.
        yields: Row-rounds and their tokens by tree, older ones counted less.
        since: The seconds since the last trial.
        has_changed: Whether the text has changed its kind since then.
        tokens: All tokens so far.
    """

    costs: Mapping[tuple[int, int], tuple[float, float]] = dataclasses.field(
        default_factory=dict
    )
    yields: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    since: float = 0.0
    has_changed: bool = False
    tokens: int = 0

    def cost(self, tree: int, batch: int) -> float | None:
        """Returns the seconds of a round; `None` if it was never timed."""
        found = self.costs.get((tree, batch))
        return found and found[1] / found[0]

    def gain(self, tree: int) -> float | None:
        """Returns the tokens that a round brings a row; `None` if it never ran."""
        if tree == 0:
            return 1.0
        found = self.yields.get(tree)
        return found and found[1] / found[0]

    def after(
        self, tree: int, batch: int, one: Stretch, *, is_trial: bool
    ) -> "Figures":
        """Returns the figures with one more stretch, by a tree of a program's rows."""
        if not (one.rounds and one.row_rounds):
            return self
        key, before = (tree, batch), self.gain(tree)
        now = one.tokens / one.row_rounds
        is_other = one.row_rounds >= _LEAST_ROUNDS and (
            before is not None and not before / _CHANGE <= now <= before * _CHANGE
        )
        costs = _add(self.costs.get(key), one.rounds, one.seconds, _COST_HALF)
        yields = _add(self.yields.get(tree), one.row_rounds, one.tokens, _YIELD_HALF)
        if is_other:
            yields = float(one.row_rounds), float(one.tokens)
        return dataclasses.replace(
            self,
            costs={**self.costs, key: costs},
            yields={**self.yields, tree: yields},
            since=0.0 if is_trial else self.since + one.seconds,
            has_changed=is_other or (self.has_changed and not is_trial),
            tokens=self.tokens + one.tokens,
        )


def choose(
    ladder: Ladder,
    figures: Figures,
    batch: int,
    *,
    left: int,
    compile_seconds: Sequence[float],
) -> tuple[int, int]:
    """Returns the tree of the next stretch, and the most rounds of it.

    Args:
        ladder: The trees.
        figures: What is known of them.
        batch: The rows of the program.
        left: The tokens that the texts in hand may still get. As many as were written
            before are expected after them.
        compile_seconds: What compiling each tree's program would take; 0 where it is
            there already.
    """
    timed = [rows for _, rows in figures.costs]
    # With other rows it was mostly the same.
    nearest = min(timed, key=lambda rows: abs(rows - batch), default=batch)
    most = STRETCH if nearest == batch else TRIAL
    is_more, batch = batch > nearest, nearest
    trees = range(len(ladder.nodes))
    speeds = {
        i: _speed(ladder, i, batch, gain, cost)
        for i in trees
        if (gain := figures.gain(i)) and (cost := figures.cost(i, batch))
    }
    if not speeds:
        few = [i for i in trees if ladder.nodes[i] * batch <= _FIRST_NODES]
        return min(ladder.start, max([1, *few])), TRIAL
    best = max(speeds, key=speeds.__getitem__)
    horizon = left + figures.tokens
    unknown = set(trees).difference(speeds)
    for tree in sorted(unknown, key=lambda i: abs(i - best)):
        promise = _promise(ladder, figures, tree, batch)
        if promise > _MARGIN * speeds[best]:
            saved = horizon / batch * (1 / speeds[best] - 1 / promise)
            # For more rows the best of before must be compiled, as a smaller one must.
            spared = compile_seconds[best] if is_more and tree < best else 0.0
            believed = _BELIEVED if tree else _ROOT_BELIEVED
            if believed * saved > compile_seconds[tree] - spared:
                return tree, TRIAL
    share = _CHANGED_SHARE if figures.has_changed else _SHARE
    for tree in sorted(speeds, key=lambda i: figures.yields.get(i, (0.0,))[0]):
        cost = figures.cost(tree, batch) or 1.0
        # If every draft were accepted.
        fastest = _speed(ladder, tree, batch, ladder.depths[tree] + 1, cost)
        lost = TRIAL * cost * (1 - speeds[tree] / speeds[best])
        if tree != best and fastest > speeds[best] and lost < share * figures.since:
            return tree, TRIAL
    return best, most


def _speed(ladder: Ladder, tree: int, batch: int, gain: float, cost: float) -> float:
    """Returns a row's tokens per second, less what waiting for others takes of it."""
    return gain / cost / (1 + _WAITING * ladder.depths[tree] * (batch > 1))


def _promise(ladder: Ladder, figures: Figures, tree: int, batch: int) -> float:
    """Returns the tokens per second that a tree may bring, by those of others."""
    gain = figures.gain(tree)
    if gain is None:
        gains = {i: figures.gain(i) or 0.0 for i in figures.yields}
        larger = [x for i, x in gains.items() if i > tree]
        smaller = {i: x for i, x in gains.items() if 0 < i < tree}
        # A larger tree brings more; how much more, nobody knows.
        gain = min(larger, default=float(ladder.depths[tree] + 1))
        if not larger and smaller:
            nearest = max(smaller)
            gain = smaller[nearest] * _MORE_TOKENS ** (tree - nearest)
    gain = min(gain, ladder.depths[tree] + 1)
    cost = _least_cost(ladder, figures, tree, batch)
    return _speed(ladder, tree, batch, gain, cost)


def _least_cost(ladder: Ladder, figures: Figures, tree: int, batch: int) -> float:
    """Returns the least seconds that a round may take, by those of other trees."""
    if (own := figures.cost(tree, batch)) is not None:
        return own
    size = ladder.nodes[tree]
    others = {
        nodes: cost
        for i, nodes in enumerate(ladder.nodes)
        if (cost := figures.cost(i, batch))
    }
    larger = [nodes for nodes in others if nodes > size]
    if not larger:  # On accelerators nodes are nearly free.
        return max(others.values())
    nodes = min(larger)
    # Drafting may take as long as the target; of many nodes each costs less.
    rows, share = (batch, 1.0) if tree else (1, 0.5)
    least = (1 + _STEEP * size * rows) / (1 + _STEEP * nodes * rows)
    return others[nodes] * least * share


def _add(
    before: tuple[float, float] | None, count: float, total: float, half: float
) -> tuple[float, float]:
    if before is None:
        return float(count), float(total)
    kept = 0.5 ** (count / half)
    return before[0] * kept + count, before[1] * kept + total
