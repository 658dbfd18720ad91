"""The picture of a run's log."""

from pathlib import Path

from eagle_jax.files import write_whole
from eagle_jax.training.checkpoint import LOG, PLOT, read_rows


def plot_log(folder: Path, *, title: str) -> None:
    """Draws loss, agreement and tokens per round over steps into a run's folder.

    Args:
        folder: The folder, which holds the log.
        title: The picture's title.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = read_rows(folder / LOG)
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    learnt = "training, with noise"
    panels = (
        ("loss", {"loss": learnt, "held_out_loss": "held out"}),
        ("agreement", {"agreement": learnt, "held_out_agreement": "held out"}),
        ("tokens per round", {"tokens_per_round": "held-out prompts"}),
    )
    for axis, (label, curves) in zip(axes, panels, strict=True):
        for column, name in curves.items():
            points = [row for row in rows if column in row]
            steps = [row["step"] for row in points]
            axis.plot(steps, [row[column] for row in points], ".-", label=name)
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    write_whole(folder / PLOT, lambda part: figure.savefig(part, format="png"))
    pyplot.close(figure)
