"""The report of an evaluation: its tables and figures."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eagle_jax.config import NOT_LOSSLESS
from eagle_jax.evaluation import plots, tables
from eagle_jax.evaluation.runs import (
    EvaluatedRun,
    Group,
    find_baseline,
    groups,
    in_order,
)
from eagle_jax.files import write_whole
from eagle_jax.progress import Report

_DPI = 150


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Section:
    """A section of the report.

    Attributes:
        title: Its title.
        make: The function from a group to its tables by title, or its figure.
        reason: The reason for which it is left out where no group has data.
        words: What stands above its content.
        file: The beginning of the names of its figures.
    """

    title: str
    make: Callable[[Group], Mapping[str, str] | Figure | None]
    reason: str
    words: str = ""
    file: str = ""


_SECTIONS = (
    _Section(
        title="Table 1: speedup and tau",
        make=tables.speedup_tables,
        reason="no runs but ablations, which are in Table 3",
        words=f"""\
Every method counts tokens in the same way: all that it emitted, the prefill's first
token and the stop token included. Cells are medians over questions of the speedup over
plain decoding of the same question, with the same settings, temperature and batch size.
tau is tokens per verification, over all steps of a task together: what steps emitted,
bonus included, neither the prefill's token nor what a limit cut off; mean is the mean
over tasks.
lossless counts the questions whose tokens are plain decoding's in every turn, of those
that both runs hold; rejection draws other tokens of the same distribution.
{NOT_LOSSLESS}.
"-" stands for what is missing.""",
    ),
    _Section(
        title="Table 3: ablations",
        make=tables.ablation_tables,
        reason="no run with rank_by=confidence or rerank=false",
        words="Counted as in Table 1.",
    ),
    _Section(
        title="n-alpha",
        make=tables.n_alpha_table,
        reason="no chain run; decode with the method chain",
        words="""\
Share of chains whose next token was accepted after n accepted ones, and how many were
tried.""",
    ),
    _Section(
        title="Figure 5: acceptance by position",
        make=plots.positions,
        reason="no eagle1 run recorded its nodes; decode eagle1 with --nodes",
        file="figure-5-positions",
    ),
    _Section(
        title="Figure 6: acceptance by confidence",
        make=plots.confidence,
        reason="no run of a draft model recorded its nodes; decode with --nodes",
        file="figure-6-confidence",
    ),
)


def write_report(runs: Sequence[EvaluatedRun], output: Path, report: Report) -> str:
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
    parts, left_out = ["# Evaluation", _runs_section(runs, compared)], []
    for section in _SECTIONS:
        shown = [part for group in compared for part in _show(section, group, output)]
        if shown:
            title = f"## {section.title}"
            parts.append("\n\n".join(filter(None, [title, section.words, *shown])))
            report(f"made {section.title}")
        else:
            left_out.append(f"- {section.title}: {section.reason}.")
    parts.append("## Left out\n\n" + ("\n".join(left_out) or "Nothing."))
    text = "\n\n".join(parts)
    file = output / "report.md"
    # It is written last, so that it never shows figures that are not there.
    write_whole(file, text + "\n")
    figures = _count(text.count("]("), "figure")
    return f"wrote {file}: {_count(len(runs), 'run')}, {figures}"


def _show(section: _Section, group: Group, output: Path) -> list[str]:
    """Returns what a section shows of a group; a figure is written to its file."""
    made = section.make(group)
    if isinstance(made, Figure):
        file = f"{section.file}-{group.slug}.png"
        write_whole(
            output / file, functools.partial(made.savefig, format="png", dpi=_DPI)
        )
        return [f"![{section.title}, {group.title}]({file})"]
    return [f"### {title}\n\n{table}" for title, table in (made or {}).items()]


def _runs_section(runs: list[EvaluatedRun], compared: list[Group]) -> str:
    """Returns the section of the runs: their settings, versions and shortcomings."""
    folders = dict.fromkeys(path.parent for run in runs for path in run.paths)
    names = ", ".join(f"`{folder}`" for folder in folders)
    questions = {key for run in runs for key in run.answers}
    counts = f"{_count(len(runs), 'run')} on {_count(len(questions), 'question')}"
    lines = [f"{counts}, read from {names}."]
    lines += ["", "The same in all runs that have it:", ""]
    lines += [f"- {line}" for line in tables.shared_settings(runs)]
    parts = ["## Runs", "\n".join(lines), tables.runs_table(runs)]
    alone = [run.file for run in runs if find_baseline(run, runs) is None]
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


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
