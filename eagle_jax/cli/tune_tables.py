"""The tables that `eagle-jax tune` prints."""

import math
from collections.abc import Sequence

from rich.table import Table

from eagle_jax.config import Method
from eagle_jax.markdown import decimals
from eagle_jax.tuning.contest import Entry
from eagle_jax.tuning.costs import StepCosts
from eagle_jax.tuning.prediction import show


def result_table(title: str, method: Method, entries: Sequence[Entry]) -> Table:
    """Returns a table of trees beside plain decoding.

    Its "known" is the share of tokens at which the prediction guesses nothing.

    Args:
        title: The title.
        method: The method that drafts.
        entries: The trees, the quickest first.
    """
    table = Table(
        *("tree", "known", "predicted tokens/round", "speedup"),
        *("measured tokens/round", "speedup"),
        title=title,
    )
    for entry in entries:
        expected = entry.prediction
        table.add_row(
            show(expected.tree, method),
            "-" if math.isnan(expected.certainty) else f"{expected.certainty:.1%}",
            decimals(expected.tokens_per_round, 3),
            decimals(expected.speedup),
            f"{entry.tokens_per_round:.3f}",
            f"{entry.speedup:.2f}",
        )
    table.add_row("plain decoding", "", "1.000", "1.00", "1.000", "1.00")
    return table


def cost_table(title: str, costs: StepCosts) -> Table:
    """Returns a table of the costs of a round's parts, in milliseconds."""
    table = Table("part", "by", "milliseconds", title=title)

    def add(part: str, by: str, values: dict[int, float]) -> None:
        shown = ", ".join(f"{key}: {1e3 * x:.3g}" for key, x in sorted(values.items()))
        table.add_row(part, by, shown)

    table.add_row("plain decoding", "", f"{1e3 * costs.token:.3g}")
    add("verification", "nodes", costs.verify)
    add("first level", "width", costs.read)
    add("each further level", "width", costs.step)
    table.add_row("rest of a round", "", f"{1e3 * costs.overhead:.3g}")
    return table
