"""What tuning found: tables, and a settings file."""

import dataclasses
import json
from collections.abc import Sequence

from rich.table import Table

from eagle_jax.cli.tune import Timing
from eagle_jax.config import Method
from eagle_jax.evaluation.step_costs import StepCosts
from eagle_jax.evaluation.tuning import Prediction, show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A tree that was run for real.

    Attributes:
        prediction: What was expected.
        tokens_per_round: Measured.
        speedup: Measured, over plain decoding.
    """

    prediction: Prediction
    tokens_per_round: float
    speedup: float


def entries(
    predictions: Sequence[Prediction], plain: Timing, timings: Sequence[Timing]
) -> list[Entry]:
    """Joins what was expected with what was measured, the quickest first."""
    joined = [
        Entry(
            prediction=prediction,
            tokens_per_round=timing.tokens_per_round,
            speedup=timing.speedup(plain),
        )
        for prediction, timing in zip(predictions, timings, strict=True)
    ]
    return sorted(joined, key=lambda entry: -entry.speedup)


def result_table(title: str, measured: Sequence[Entry]) -> Table:
    """Returns trees beside plain decoding.

    "known" is the share of tokens at which the prediction guesses nothing.
    """
    table = Table(
        *("tree", "known", "predicted tokens/round", "speedup"),
        *("measured tokens/round", "speedup"),
        title=title,
    )
    for entry in measured:
        prediction = entry.prediction
        table.add_row(
            show(prediction.tree),
            f"{prediction.certainty:.1%}",
            f"{prediction.tokens_per_round:.3f}",
            f"{prediction.speedup:.2f}",
            f"{entry.tokens_per_round:.3f}",
            f"{entry.speedup:.2f}",
        )
    table.add_row("plain decoding", "", "1.000", "1.00", "1.000", "1.00")
    return table


def cost_table(title: str, costs: StepCosts) -> Table:
    """Returns what the parts of a round cost."""
    table = Table("part", "by", "milliseconds", title=title)

    def add(part: str, by: str, values: dict[int, float]) -> None:
        shown = ", ".join(f"{key}: {1e3 * x:.2f}" for key, x in sorted(values.items()))
        table.add_row(part, by, shown)

    table.add_row("plain decoding", "", f"{1e3 * costs.token:.2f}")
    add("verification", "nodes", costs.verify)
    add("first level", "width", costs.read)
    add("each further level", "width", costs.step)
    table.add_row("rest of a round", "", f"{1e3 * costs.overhead:.2f}")
    return table


def distance(best: Entry, swept: Sequence[Entry]) -> str:
    """Returns how far the recommendation is from the best tree of a sweep.

    Args:
        best: Of the finalists.
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
    comments: Sequence[str],
) -> str:
    """Returns a settings file for scripts/generate.py.

    Args:
        best: The quickest tree; plain decoding is recommended if that is quicker.
        method: What drafts.
        temperature: What was tuned for: above 0 the tree is that of sampled text.
        batch_size: Likewise.
        dtype: As given; "auto" is left out.
        comments: Lines that say where the figures come from.
    """
    tree, pays = best.prediction.tree, best.speedup > 1
    figures = (
        f"measured: {best.tokens_per_round:.2f} tokens per round, {best.speedup:.2f} "
        "times the speed of plain decoding"
    )
    if not pays:
        figures = f"no tree pays; the best, {show(tree)}: {figures}"
    lines = [f"# {line}".rstrip() for line in (*comments, figures)]
    if pays:
        table = "sampled_tree" if temperature > 0 else "tree"
        lines += ["", f"[{table}]", f"num_nodes = {tree.num_nodes}"]
        lines += [f"depth = {tree.depth}", f"width = {tree.width}"]
        if tree.calibration is not None:
            lines.append(f"calibration = {json.dumps(tree.calibration)}")
    chosen = method if pays else "autoregressive"
    lines += ["", "[decoding]", f'method = "{chosen}"', f"batch_size = {batch_size}"]
    if dtype != "auto":
        lines.append(f'dtype = "{dtype}"')
    return "\n".join(lines) + "\n"
