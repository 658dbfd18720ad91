"""The report of an evaluation: its tables and figures."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eagle_jax.config import NOT_LOSSLESS
from eagle_jax.evaluation import papers, plots, tables
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
    ("figure-6-value", "Figure 6 for path values", plots.value),
    ("acceptance-by-depth", "Acceptance by depth", plots.depth),
    ("acceptance-by-rank", "Acceptance by rank", plots.rank),
    ("accepted-lengths", "Accepted lengths", plots.lengths),
    ("wasted-nodes", "Wasted nodes", plots.wasted),
    ("step-time", "Step times", plots.step_time),
    ("n-alpha", "n-alpha of chains", plots.n_alpha),
)
_COUNTING = """\
Every method counts tokens in the same way: all that it emitted, the prefill's first
token and the stop token included. Cells are medians over questions of the speedup over
plain decoding of the same question, with the same settings, temperature and batch size.
tau is tokens per verification, over all steps of a task together: what steps emitted,
bonus included, neither the prefill's token nor what a limit cut off; mean is the mean
over tasks.
lossless counts the questions whose tokens are plain decoding's in every turn, of those
that both runs hold; rejection draws other tokens of the same distribution.
"-" stands for what is missing."""
_WHOLE = """\
The six tasks of EAGLE-2's Table 1, prefill included, counted as above. Rows marked
"paper" are that paper's own figures, of its models and devices: not measured here."""
_TYPICAL = f"""\
{NOT_LOSSLESS}. Drafts that are likely enough are taken, whatever the target would
have drawn (Medusa): such runs stand in no other table, and in no figure."""
_CHAINS = """\
tau of a chain and of a tree as deep: both take as many passes per round. Rows marked
"paper" are EAGLE-1's own figures, of its models: not measured here."""
_SPREAD = """\
Medians over questions, quartiles in brackets. Without prefill, the first token of a
turn, which the prefill gives, does not count either."""
_BATCHES = """\
Tokens per second over the whole run, prefill included, and its ratio to plain
decoding's at the same batch size; last, the best over batch sizes against plain
decoding's best."""
_CALIBRATION = """\
A node is tried where its parent was accepted. ECE is the expected calibration error:
the distance between confidence and acceptance rate in 20 bins, averaged over nodes.
That of values is over all drafted nodes. Roots are not counted."""
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
    everything = in_order(runs)
    runs = [run for run in everything if run.is_lossless]
    output.mkdir(parents=True, exist_ok=True)
    compared = groups(runs, one_batch_size=True)
    sections, left_out = _table_sections(runs, compared)
    sections += _typical_section(everything)
    shown, not_drawn = _draw_figures(compared, output, report)
    lines = [
        f"- {line}" for line in [*_larger_batches(compared), *left_out, *not_drawn]
    ]
    sections = [*sections, *shown]
    sections.append("## Left out\n\n" + ("\n".join(lines) or "Nothing."))
    first = _runs_section(everything, compared)
    text = "\n\n".join(["# Evaluation", first, *sections])
    file = output / "report.md"
    # It is written last, so that it never shows figures that are not there.
    write_whole(file, text + "\n")
    figures = _count(text.count("]("), "figure")
    return f"wrote {file}: {_count(len(everything), 'run')}, {figures}"


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


def _table_sections(
    runs: list[Run], compared: list[Group]
) -> tuple[list[str], list[str]]:
    """Returns the sections of tables, and a line for each that has no data."""
    sections, left_out = [], []
    for title, words, found, reason in _all_tables(runs, compared):
        parts = [f"### {name}\n\n{table}" for name, table in found.items() if table]
        if parts:
            sections.append("\n\n".join([f"## {title}", words, *parts]))
        else:
            left_out.append(f"{title}: {reason}.")
    return sections, left_out


def _all_tables(
    runs: list[Run], compared: list[Group]
) -> tuple[tuple[str, str, Mapping[str, str | None], str], ...]:
    """Returns each section's title, words, tables by name, and why it may have none."""
    both = (("prefill included", True), ("prefill excluded", False))
    speedups = {
        f"{group.title}, {name}": tables.speedup_table(group, with_prefill=flag)
        for group in compared
        for name, flag in both
    }
    ablations = {
        f"{title}, {name}": table
        for name, flag in both
        for title, table in tables.ablation_tables(runs, with_prefill=flag).items()
    }
    return (
        (
            "Table 1: speedup and tau",
            _COUNTING,
            speedups,
            "no runs but ablations, which are in Table 3",
        ),
        (
            "Table 1 beside the paper's",
            _WHOLE,
            _by_group(papers.whole_table_1, compared),
            "no run that drafts holds one of its six tasks",
        ),
        (
            "Table 1: temperatures side by side",
            "Means over tasks of the table above.",
            {
                f"{title}, {name}": table
                for name, flag in both
                for title, table in tables.temperature_tables(
                    runs, with_prefill=flag
                ).items()
            },
            "runs of one temperature only",
        ),
        ("Spread", _SPREAD, _by_group(tables.spread_table, compared), ""),
        (
            "First differences",
            "Where a text first leaves plain decoding's; turns and tokens from 1.",
            _by_group(tables.differences_table, compared),
            "no text that can be compared differs from plain decoding's",
        ),
        (
            "Table 3: ablations",
            "Counted as in Table 1.",
            ablations,
            "no eagle2 run with rank_by=confidence or rerank=false",
        ),
        (
            "Table 5 of EAGLE-1: chain and tree at equal passes",
            _CHAINS,
            {t: x for g in compared for t, x in papers.chain_tables(g).items()},
            "no chain and no eagle1 or eagle2 run of its depth",
        ),
        (
            "Table 7: batch sizes and throughput",
            _BATCHES,
            tables.batch_tables(runs),
            "no temperature with several batch sizes",
        ),
        (
            "Calibration and waste",
            _CALIBRATION,
            _by_group(tables.calibration_table, compared),
            "no run recorded its nodes; decode with --nodes",
        ),
        (
            "n-alpha",
            _N_ALPHA,
            _by_group(tables.n_alpha_table, compared),
            "no chain run; decode with the method chain",
        ),
    )


def _typical_section(runs: list[Run]) -> list[str]:
    """Returns the section of runs that are not lossless, if there are any."""
    typical = [run for run in runs if not run.is_lossless]
    parts = ["## Typical acceptance: not lossless", _TYPICAL]
    for group in groups(typical, one_batch_size=False):
        table = tables.methods_by_tasks(
            group.runs, group.names, runs, with_prefill=True
        )
        parts.append(f"### {group.title}\n\n{table}")
    return ["\n\n".join(parts)] if typical else []


def _larger_batches(compared: list[Group]) -> list[str]:
    """Returns a line for each group with runs that only Table 7 shows."""
    lines = []
    for group in compared:
        smallest = group.runs[0].batch_size
        larger = [
            run
            for run in group.everything
            if (run.setup(), run.temperature)
            == (group.runs[0].setup(), group.runs[0].temperature)
            and run.batch_size > smallest
        ]
        if larger:
            sizes = ", ".join(str(n) for n in sorted({r.batch_size for r in larger}))
            lines.append(
                f"{group.title}: {_count(len(larger), 'run')} at batch size {sizes}, "
                "in Table 7 only."
            )
    return lines


def _by_group(
    make: Callable[[Group], str | None], compared: list[Group]
) -> dict[str, str | None]:
    """Returns a table per group, by title."""
    return {group.title: make(group) for group in compared}


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
