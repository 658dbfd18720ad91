"""What trees took and brought, kept from one process to the next."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from eagle_jax.engine.choice import STRETCH, Figures
from eagle_jax.errors import InputError
from eagle_jax.files import write_json


def read_figures(path: Path, labels: Sequence[str]) -> Figures:
    """Reads what was kept of trees; a file that is missing or broken says nothing.

    They count as much as a stretch of this process will: it may be another hour.

    Args:
        path: The file.
        labels: The trees of the ladder, by their sizes.
    """
    costs, yields = {}, {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        for tree, label in enumerate(labels):
            for rows, pair in kept["costs"].get(label, {}).items():
                costs[tree, int(rows)] = _scaled(*pair)
            if label in kept["yields"]:
                yields[tree] = _scaled(*kept["yields"][label])
        return Figures(costs=costs, yields=yields)
    return Figures()


def write_figures(path: Path, labels: Sequence[str], figures: Figures) -> None:
    """Keeps what is known of trees, where there is room for it."""
    costs: dict[str, dict[int, tuple[float, float]]] = {}
    for (tree, rows), found in figures.costs.items():
        costs.setdefault(labels[tree], {})[rows] = found
    yields = {labels[tree]: found for tree, found in figures.yields.items()}
    if costs:
        with contextlib.suppress(InputError, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"costs": costs, "yields": yields})


def _scaled(count: float, total: float) -> tuple[float, float]:
    if not (0 < count < math.inf and 0 < total < math.inf):
        raise ValueError
    part = min(1.0, STRETCH / count)
    return count * part, total * part
