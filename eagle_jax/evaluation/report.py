"""The report of an evaluation: its tables and figures."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eagle_jax.config import NOT_LOSSLESS
from eagle_jax.evaluation import plots, tables
from eagle_jax.evaluation.runs import (
    Group,
    Run,
    find_baseline,
    groups,
    in_order,
    unique_names,
)
from eagle_jax.files import write_whole
from eagle_jax.progress import Report

_DPI = 150
_FIGURES: tuple[tuple[str, str, Callable[[Group], Figure | str]], ...] = (
    ("figure-5-positions", "Figure 5: acceptance by position", plots.positions),
    ("figure-6-confidence", "Figure 6: acceptance by confidence", plots.confidence),
)
_COUNTING = f"""\
Every method counts tokens in the same way: all that it emitted, the prefill's first
token and the stop token included. Cells are medians over questions of the speedup over
plain decoding of the same question, with the same settings, temperature and batch size.
tau is tokens per verification, over all steps of a task together: what steps emitted,
bonus included, neither the prefill's token nor what a limit cut off; mean is the mean
over tasks.
lossless counts the questions whose tokens are plain decoding's in every turn, of those
that both runs hold; rejection draws other tokens of the same distribution.
{NOT_LOSSLESS}.
"-" stands for what is missing."""
_N_ALPHA = """\
Share of chains whose next token was accepted after n accepted ones, and how many were
tried."""


def write_report(runs: Sequence[Run], output: Path, report: Report) -> str:
    """Writes `report.md` and the PNG files that it shows.

    Args:
        runs: The runs to compare.
        output: The folder, which is made if it is missing.
        report: Called with the name of each figure that is drawn.

    Returns:
        A line that names what was written.
    """
    runs = in_order(runs)
    output.mkdir(parents=True, exist_ok=True)
    compared = groups(runs)
    sections, left_out = _table_sections(compared)
    shown, not_drawn = _draw_figures(compared, output, report)
    lines = [f"- {line}" for line in [*left_out, *not_drawn]]
    last = "## Left out\n\n" + ("\n".join(lines) or "Nothing.")
    parts = ["# Evaluation", _runs_section(runs, compared), *sections, *shown, last]
    text = "\n\n".join(parts)
    file = output / "report.md"
    # It is written last, so that it never shows figures that are not there.
    write_whole(file, text + "\n")
    figures = _count(text.count("]("), "figure")
    return f"wrote {file}: {_count(len(runs), 'run')}, {figures}"


def _runs_section(runs: list[Run], compared: list[Group]) -> str:
    """Returns the section of the runs: their settings, versions and shortcomings."""
    folders = dict.fromkeys(path.parent for run in runs for path in run.paths)
    names = ", ".join(f"`{folder}`" for folder in folders)
    questions = {key for run in runs for key in run.answers}
    counts = f"{_count(len(runs), 'run')} on {_count(len(questions), 'question')}"
    lines = [f"{counts}, read from {names}."]
    lines += ["", "The same in all runs that have it:", ""]
    lines += [f"- {line}" for line in tables.shared_settings(runs)]
    parts = ["## Runs", "\n".join(lines), tables.runs_table(runs)]
    alone = [
        name
        for name, run in zip(unique_names(runs), runs, strict=True)
        if find_baseline(run, runs) is None
    ]
    if alone:
        parts.append(
            "No autoregressive run has the settings, temperature and batch size of "
            f'{", ".join(alone)}: speedups and losslessness are "-".'
        )
    for group in compared:
        if len({frozenset(run.answers) for run in group.runs}) > 1:
            parts.append(
                f"At {group.title}, not all runs hold the same questions: compare "
                "speedups and tau of a column with care."
            )
    return "\n\n".join(parts)


def _table_sections(compared: list[Group]) -> tuple[list[str], list[str]]:
    """Returns the sections of tables, and a line for each that has no data."""
    speedups, ablations = dict[str, str | None](), dict[str, str]()
    for group in compared:
        for name, flag in (("prefill included", True), ("prefill excluded", False)):
            title = f"{group.title}, {name}"
            speedups[title] = tables.speedup_table(group, with_prefill=flag)
            found = tables.ablation_tables(group, with_prefill=flag)
            ablations |= {f"{title}, {name}": table for title, table in found.items()}
    every = (
        (
            "Table 1: speedup and tau",
            _COUNTING,
            speedups,
            "no runs but ablations, which are in Table 3",
        ),
        (
            "Table 3: ablations",
            "Counted as in Table 1.",
            ablations,
            "no eagle2 run with rank_by=confidence or rerank=false",
        ),
        (
            "n-alpha",
            _N_ALPHA,
            {group.title: tables.n_alpha_table(group) for group in compared},
            "no chain run; decode with the method chain",
        ),
    )
    sections, left_out = [], []
    for title, words, found, reason in every:
        parts = [f"### {name}\n\n{table}" for name, table in found.items() if table]
        if parts:
            sections.append("\n\n".join([f"## {title}", words, *parts]))
        else:
            left_out.append(f"{title}: {reason}.")
    return sections, left_out


def _draw_figures(
    compared: list[Group], output: Path, report: Report
) -> tuple[list[str], list[str]]:
    """Writes the figures.

    Returns:
        Sections that show them, and a line for each that has no data.
    """
    sections, left_out = [], []
    for name, title, draw in _FIGURES:
        shown = []
        for group in compared:
            figure = draw(group)
            if isinstance(figure, str):
                left_out.append(f"{title}, {group.title}: {figure}.")
                continue
            file = f"{name}-{group.slug}.png"
            write_whole(output / file, functools.partial(_save, figure))
            shown.append(f"![{title}, {group.title}]({file})")
        if shown:
            sections.append("\n\n".join([f"## {title}", *shown]))
            report(f"drew {title}")
    return sections, left_out


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=_DPI)
