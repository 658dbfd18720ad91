"""The log of a run: a CSV file that a resumed run goes on with, and its plot."""

import csv
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.files import append, write_whole

COLUMNS = (
    *("step", "tokens", "loss", "feature_loss", "token_loss", "agreement"),
    *("tokens_per_second", "held_out_loss", "held_out_agreement"),
    *("alpha_0", "alpha_1", "alpha_2", "alpha_3", "alpha_4", "tokens_per_round"),
)
"""The columns of the CSV file; held-out ones are empty between evaluations."""


class CsvLog:
    """A log that lines are appended to, each flushed as it is written.

    Attributes:
        losses: The losses of the lines that were kept.
        held_out_losses: Those of held-out rows, of fewer lines.
    """

    def __init__(self, path: Path, *, after: int, writes: bool = True) -> None:
        """Opens a log and drops what a resumed run will write again.

        Args:
            path: The file, which is made if it is missing.
            after: The step up to which lines are kept.
            writes: Whether this process is the one that writes the file.
        """
        kept = [row for row in read_log(path) if int(row["step"]) <= after]
        self.losses = [float(row["loss"]) for row in kept]
        held_out = (row["held_out_loss"] for row in kept)
        self.held_out_losses = [float(loss) for loss in held_out if loss]
        self._path, self._writes = path, writes
        if writes:
            lines = [",".join(COLUMNS)]
            lines += [",".join(row[name] for name in COLUMNS) for row in kept]
            write_whole(path, "\n".join(lines) + "\n")

    def write(self, row: dict[str, Any]) -> None:
        """Appends a line; absent columns stay empty."""
        if self._writes:
            values = (_text(row.get(name, "")) for name in COLUMNS)
            append(self._path, ",".join(values) + "\n")


def read_log(path: Path) -> list[dict[str, str]]:
    """Returns the whole lines of a log, none where there is no file.

    Raises:
        InputError: If the file is something else.
    """
    if not path.exists():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) == COLUMNS:
                return [row for row in reader if _is_whole(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no log of a training run: {error}") from error
    raise InputError(f"{path} is no log of a training run")


def _is_whole(row: dict[str, Any]) -> bool:
    """Returns whether a line is whole; one that a kill cut short lacks columns."""
    if None in row.values() or set(row) != set(COLUMNS) or not row["loss"]:
        return False
    try:
        for name in COLUMNS:
            float(row[name] or 0)
        return int(row["step"]) >= 0
    except ValueError:
        return False


def plot_log(log: Path, picture: Path, *, title: str) -> None:
    """Draws loss, agreement and tokens per round over steps.

    Args:
        log: The CSV file.
        picture: The PNG or SVG file to write.
        title: The picture's title.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = read_log(log)
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
            points = [(int(r["step"]), float(r[column])) for r in rows if r[column]]
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


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
