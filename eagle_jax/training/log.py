"""The log of a run, which a resumed run goes on with, and its plot."""

import itertools
from pathlib import Path
from typing import Any

from eagle_jax.files import write_whole
from eagle_jax.logs import read_log
from eagle_jax.parsing import check_type, parse_json, value_at

LOG = "log.jsonl"
"""The name of the log in a run's folder: a file of `JsonLines`."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the whole rows of a log, see `loop.LogRow.columns`."""
    lines = itertools.islice(read_log(path), 1, None)
    rows = {where: parse_json(line, where) for where, line in lines}
    for where, row in rows.items():
        for name in ("step", "tokens"):
            check_type(int, value_at(row, name), f"{where}: {name}")
    return list(rows.values())


def plot_log(log: Path, picture: Path, *, title: str) -> None:
    """Draws loss, agreement and tokens per round over steps.

    Args:
        log: The file.
        picture: The PNG or SVG file to write.
        title: The picture's title.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = read_rows(log)
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    panels = (
        ("loss", {"loss": "training, with noise", "held_out_loss": "held out"}),
        (
            "agreement with the target",
            {"agreement": "training, with noise", "held_out_agreement": "held out"}
            | {f"alpha_{n}": f"{n}-alpha" for n in range(5)},
        ),
        ("tokens per round", {"tokens_per_round": "held-out prompts"}),
    )
    for axis, (label, curves) in zip(axes, panels, strict=True):
        for column, name in curves.items():
            points = [(row["step"], row[column]) for row in rows if column in row]
            marker = "" if len(points) > 60 else "."
            width = 0.8 if column.startswith("alpha") else 1.5
            axis.plot(*zip(*points, strict=True), label=name, marker=marker, lw=width)
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    kind = picture.suffix.removeprefix(".")
    write_whole(picture, lambda part: figure.savefig(part, dpi=110, format=kind))
    pyplot.close(figure)
