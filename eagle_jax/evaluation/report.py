"""The report of an evaluation: its tables and figures."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eagle_jax.evaluation import plots, tables
from eagle_jax.evaluation.runs import (
    EvaluatedRun,
    Group,
    find_baseline,
    groups,
    in_order,
)
from eagle_jax.files import write_whole

_Maker = Callable[[Group], Mapping[str, str] | Figure | None]
"""A function from a group to its tables by title, or its figure."""

_DPI = 150

FEW = 6
"""The least number of questions whose values' range holds their median with 95%.

It does with a probability of `1 - 2 / 2**n`, whatever the distribution.
"""

_TABLE_1 = """\
Every method counts tokens in the same way: all that it emitted, the prefill's first
token and the stop token included. Cells are medians over questions of the speedup over
plain decoding of the same question, with the same settings, temperature and batch size;
prefills are included.
tau is tokens per verification, over all steps of a task together: what steps emitted,
bonus included, neither the prefill's token nor what a limit cut off; mean is the mean
over tasks.
lossless counts the questions whose tokens are plain decoding's in every turn, of those
that both runs hold; rejection draws other tokens of the same distribution.
"-" stands for what is missing."""
_CHAINS = """\
Share of drafts that were accepted at each depth where those before were, and how many
were tried: the papers' 0-alpha, 1-alpha, ..."""

# Each with the words above its tables or the name of its figures' files.
_SECTIONS: tuple[tuple[str, _Maker, str], ...] = (
    ("Table 1: speedup and tau", tables.speedup_tables, _TABLE_1),
    ("Table 3: ablations", tables.ablation_tables, "Counted as in Table 1."),
    ("Chain acceptance by depth", tables.chain_acceptance_table, _CHAINS),
    ("Acceptance by depth", plots.depths, "acceptance-by-depth"),
    ("Figure 5: acceptance by position", plots.positions, "figure-5-positions"),
    ("Figure 6: acceptance by confidence", plots.confidence, "figure-6-confidence"),
)
_LEFT_OUT = """\
Table 3 is of runs with rank_by=confidence or rerank=false, chain acceptance of the
method chain; of runs with --nodes Figure 5 is of eagle1, Figure 6 of methods that draft
with a model.
Left out for want of such runs: """


def write_report(runs: Sequence[EvaluatedRun], output: Path) -> str:
    """Writes `report.md` and the PNG files that it shows; says what was written.

    The folder is made if it is missing.
    """
    runs = in_order(runs)
    output.mkdir(parents=True, exist_ok=True)
    compared = groups(runs)
    parts, left_out = ["# Evaluation", _runs_section(runs, compared)], list[str]()
    for title, make, words in _SECTIONS:
        above, shown = [f"## {title}"], list[str]()
        for group in compared:
            made = make(group)
            if isinstance(made, Figure):
                file = f"{words}-{group.slug}.png"
                save = functools.partial(made.savefig, format="png", dpi=_DPI)
                write_whole(output / file, save)
                shown.append(f"![{title}, {group.title}]({file})")
            elif made:
                above = [f"## {title}", words]
                shown += [f"### {name}\n\n{table}" for name, table in made.items()]
        if shown:
            parts.append("\n\n".join([*above, *shown]))
        else:
            left_out.append(title)
    if left_out:
        parts.append(f"## Left out\n\n{_LEFT_OUT}{', '.join(left_out)}.")
    text = "\n\n".join(parts)
    file = output / "report.md"
    # It is written last, so that it never shows figures that are not there.
    write_whole(file, text + "\n")
    figures = _count(text.count("]("), "figure")
    return f"wrote {file}: {_count(len(runs), 'run')}, {figures}"


def _runs_section(runs: list[EvaluatedRun], compared: list[Group]) -> str:
    """Returns the section of the runs: their settings, versions and shortcomings."""
    folders = dict.fromkeys(run.path.parent for run in runs)
    names = ", ".join(f"`{folder}`" for folder in folders)
    questions = {(key, one.task) for run in runs for key, one in run.answers.items()}
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
    unfinished = [run.file for run in runs if run.missing]
    if unfinished:
        parts.append(
            f"Unfinished: {', '.join(unfinished)}. The same command of eagle-jax "
            "evaluate, run again, answers what is missing."
        )
    tasks = collections.Counter(task for _, task in sorted(questions))
    few = [f"{task} ({count})" for task, count in tasks.items() if count < FEW]
    if few:
        parts.append(
            f"Too few questions: {', '.join(few)}. Of fewer than {FEW} not even the "
            "range from the least to the largest value holds the median with a "
            "probability of 95%: read these columns as examples."
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
