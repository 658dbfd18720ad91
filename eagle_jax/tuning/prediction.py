"""Predictions of which tree pays: expected tokens per round over expected seconds."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from eagle_jax.config import Method, TreeConfig
from eagle_jax.errors import InputError
from eagle_jax.generation.methods import SETTINGS
from eagle_jax.tree import Topology
from eagle_jax.tuning.costs import StepCosts
from eagle_jax.tuning.recording import Recording

NODES = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""The numbers of nodes, root included, whose verification is timed."""

WIDTHS = (1, 2, 4, 8, 10)
"""The widths that are tried."""

DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10)
"""The depths that are tried."""

_MOST_OF_A_WIDTH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The expected figures of a tree.

    Attributes:
        tree: The tree's settings, or a static tree.
        tokens_per_round: The expected number of emitted tokens per round; NaN where
            none is predicted.
        speedup: The expected speed over plain decoding's; NaN where none is predicted.
        certainty: The share of the text's tokens at which the tree is known exactly;
            NaN where rates alone are known.
    """

    tree: TreeConfig | Topology
    tokens_per_round: float = math.nan
    speedup: float = math.nan
    certainty: float = math.nan


def grid(max_nodes: int, max_depth: int) -> list[TreeConfig]:
    """Returns the trees that are compared, no two of which are the same.

    Args:
        max_nodes: The largest number of nodes, root included.
        max_depth: The largest depth.
    """
    trees = []
    for width in WIDTHS:
        for depth in (d for d in DEPTHS if d <= max_depth):
            # Nodes beyond the candidates would be padding, levels beyond the nodes cut.
            most = 1 + width + (depth - 1) * width**2
            sizes = NODES if width > 1 else (depth + 1,)
            trees += [
                TreeConfig(num_nodes=nodes, depth=depth, width=width)
                for nodes in sizes
                if depth < nodes <= min(most, max_nodes)
            ]
    return trees


def parse_grid(text: str) -> list[TreeConfig]:
    """Reads trees written as `num_nodes/depth/width`, separated by blanks.

    >>> [show(tree) for tree in parse_grid("8/7/1 60/6/10")]
    ['8/7/1', '60/6/10']

    Raises:
        InputError: If there is no tree, or one is written otherwise or drafts nothing.
    """
    trees: list[TreeConfig] = []
    for part in text.split():
        sizes = re.fullmatch(r"(\d{1,10})/(\d{1,10})/(\d{1,10})", part)
        if sizes is None:
            raise InputError(
                f"`grid` {part[:99]!r} must be num_nodes/depth/width, such as 8/7/1"
            )
        nodes, depth, width = map(int, sizes.groups())
        tree = TreeConfig(num_nodes=nodes, depth=depth, width=width)
        if tree.levels < 1:
            raise InputError(
                f"`grid` {part} drafts nothing: give num_nodes >= 2 and depth >= 1"
            )
        if tree not in trees:
            trees.append(tree)
    if not trees:
        raise InputError('`grid` is empty; give settings such as "8/7/1 10/9/1"')
    return trees


def sizes(method: Method) -> list[str]:
    """Returns the names of the numbers that a method reads, those of a tree first."""
    default = TreeConfig()
    return [
        name for name in SETTINGS[method] if type(getattr(default, name, None)) is int
    ]


def show(tree: TreeConfig | Topology, method: Method = "eagle2") -> str:
    """Returns a method's `sizes` as `parse_grid` reads them; no width if static."""
    if isinstance(tree, Topology):
        return f"{tree.num_nodes}/{tree.depth}"
    return "/".join(str(getattr(tree, name)) for name in sizes(method))


def predict(
    trees: Sequence[TreeConfig],
    recorded: Sequence[dict[int, Recording]],
    costs: StepCosts,
    *,
    batch_size: int,
) -> list[Prediction]:
    """Returns the expected figures of every tree, the quickest first.

    A batch runs until its longest row ends, so its rounds are those of that row.

    Args:
        trees: The trees, of recorded widths and not deeper than recorded.
        recorded: Each text's recordings by width.
        costs: The costs of rounds at this batch size.
        batch_size: The number of texts decoded together, in their order.
    """
    predictions = []
    for tree in trees:
        texts = [text[tree.width] for text in recorded]
        steps = [len(text.places) for text in texts]
        rounds = [len(text.accept_lengths(tree)) for text in texts]
        certain = [text.is_certain(tree) for text in texts]
        plain = costs.token * _batch_steps(steps, batch_size)
        ours = costs.round_seconds(tree) * _batch_steps(rounds, batch_size)
        predictions.append(
            Prediction(
                tree=tree,
                tokens_per_round=sum(steps) / sum(rounds),
                speedup=plain / ours,
                certainty=float(np.concatenate(certain).mean()),
            )
        )
    return sorted(predictions, key=lambda prediction: -prediction.speedup)


def finalists(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """Returns the best, at most two of one width while there are others.

    Predictions err alike for trees that are alike: a few widths are worth more than
    five neighbours.

    Args:
        predictions: The predictions for dynamic trees, the quickest first.
        count: The number of predictions to choose.
    """
    chosen, rest = [], []
    for prediction in predictions:
        width = _width(prediction)
        of_width = sum(_width(other) == width for other in chosen)
        full = len(chosen) == count or of_width == _MOST_OF_A_WIDTH
        (rest if full else chosen).append(prediction)
    chosen += rest[: count - len(chosen)]
    return sorted(chosen, key=lambda prediction: -prediction.speedup)


def _width(prediction: Prediction) -> int:
    assert isinstance(prediction.tree, TreeConfig)
    return prediction.tree.width


def _batch_steps(steps: Sequence[int], batch_size: int) -> int:
    """Returns the steps of all batches, each as long as its longest row."""
    starts = range(0, len(steps), batch_size)
    return sum(max(steps[start : start + batch_size]) for start in starts)
