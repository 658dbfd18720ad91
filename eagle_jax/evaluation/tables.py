"""The tables of a report, as markdown that also reads well as plain text."""

import json
from statistics import median

from eagle_jax.config import shortest
from eagle_jax.evaluation.runs import (
    SETUP,
    TREE,
    Group,
    Run,
    find_baseline,
    identical,
    speedups,
    varying,
)
from eagle_jax.markdown import NOTHING, decimals, markdown, ratio


def runs_table(runs: list[Run]) -> str:
    """Returns a table of all runs, without the settings that they share."""
    columns = [name for name in (*TREE, *SETUP) if len(_given(runs, name)) > 1]
    header = ["file", "method", "temperature", "batch size", *columns]
    header += ["questions", "turns", "tokens"]
    rows = []
    for run in runs:
        answers = run.answers.values()
        rows.append(
            [
                ", ".join(f"{path.parent.name}/{path.name}" for path in run.paths),
                run.settings["label"],
                shortest(run.temperature),
                str(run.batch_size),
                *(_setting(run.settings.get(column)) for column in columns),
                str(len(answers)),
                str(sum(len(answer.new_tokens) for answer in answers)),
                str(sum(sum(answer.new_tokens) for answer in answers)),
            ]
        )
    return markdown(header, rows)


def shared_settings(runs: list[Run]) -> list[str]:
    """Returns a line for each setting that is the same wherever it is given."""
    shared = [(name, _given(runs, name)) for name in (*SETUP, *TREE)]
    lines = [f"{n}: {_setting(v[0])}" for n, v in shared if len(v) == 1]
    versions = [run.settings.get("versions", {}) for run in runs]
    named = [", ".join(f"{n} {v}" for n, v in found.items()) for found in versions]
    return lines + [f"versions: {text}" for text in dict.fromkeys(named)]


def speedup_table(group: Group, *, with_prefill: bool) -> str | None:
    """Returns Table 1: methods by tasks, speedup and tau, their mean, losslessness.

    Args:
        group: The runs to compare; ablated ones are left to Table 3.
        with_prefill: Whether times include the prefill.

    Returns:
        The table, `None` if the group has no run that belongs in it.
    """
    named = zip(group.names, group.runs, strict=True)
    rows = [(name, run) for name, run in named if not run.is_ablated]
    return _by_task(rows, group, with_prefill) if rows else None


def ablation_tables(group: Group, *, with_prefill: bool) -> dict[str, str]:
    """Returns Table 3 for each family of EAGLE-2 runs of which one is ablated.

    A family has everything in common but `rank_by` and `rerank`.

    Args:
        group: The runs to compare.
        with_prefill: Whether times include the prefill.

    Returns:
        The tables by title.
    """
    families: dict[str, list[Run]] = {}
    for run in group.runs:
        if run.method == "eagle2":
            families.setdefault(run.key("rank_by", "rerank", "label"), []).append(run)
    eagle2 = [run for family in families.values() for run in family]
    names = ["num_nodes", "depth", "width"]
    names += varying(eagle2, ("draft", "calibration", "acceptance"))
    result = {}
    for family in families.values():
        if any(run.is_ablated for run in family):
            settings = family[0].settings
            sizes = [f"{name} {_setting(settings.get(name))}" for name in names]
            rows = [(_ablation(run)[1], run) for run in sorted(family, key=_ablation)]
            title = ", ".join([group.title, *sizes])
            result[title] = _by_task(rows, group, with_prefill)
    return result


def n_alpha_table(group: Group) -> str | None:
    """Returns n-alpha of the chains with how often it was tried, `None` without any."""
    chains = [
        (name, run.n_alpha())
        for name, run in zip(group.names, group.runs, strict=True)
        if run.method == "chain"
    ]
    if not chains:
        return None
    longest = max(len(rates.tried) for _, rates in chains)
    rows = []
    for name, found in chains:
        pairs = zip(found.rates, found.tried, strict=True)
        cells = [f"{decimals(share, 3)} ({tried:,})" for share, tried in pairs]
        rows.append([name, *cells, *[NOTHING] * (longest - len(cells))])
    return markdown(["method", *(f"{n}-alpha" for n in range(longest))], rows)


def _ablation(run: Run) -> tuple[int, str]:
    """Returns the place and the name of an EAGLE-2 run in Table 3."""
    by_value = run.settings.get("rank_by") != "confidence"
    is_reranked = run.settings.get("rerank") is not False
    names = ("w/o both", "w/o value", "w/o reranking", "eagle2")
    place = 2 * by_value + is_reranked
    return place, names[place]


def _by_task(rows: list[tuple[str, Run]], group: Group, with_prefill: bool) -> str:
    """Returns a row per run: speedup and tau of each task, their mean, losslessness."""
    tasks = list(dict.fromkeys(task for _, run in rows for task in run.tasks))
    header = ["method"]
    for task in (*tasks, "mean"):
        header += [f"{task} speedup", f"{task} tau"]
    cells = []
    for name, run in rows:
        baseline = find_baseline(run, group.everything)
        gains: list[float | None] = []
        for task in tasks:
            found = speedups(run, baseline, task=task, with_prefill=with_prefill)
            gains.append(median(found) if found else None)
        taus = [run.tau(task) for task in tasks]
        cells.append([name])
        for gain, tau in zip([*gains, _mean(gains)], [*taus, _mean(taus)], strict=True):
            cells[-1] += [ratio(gain), decimals(tau)]
        cells[-1].append(_lossless(run, baseline))
    return markdown([*header, "lossless"], cells)


def _lossless(run: Run, baseline: Run | None) -> str:
    """Returns the numbers of `identical` as a cell, or that a run cannot be so."""
    if not run.is_lossless:
        return "NOT LOSSLESS"
    found = identical(run, baseline)
    return NOTHING if found is None else "{}/{}".format(*found)


def _mean(values: list[float | None]) -> float | None:
    """Returns the mean over tasks, `None` if one is missing: rows are compared."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _given(runs: list[Run], name: str) -> list[object]:
    """Returns the values of a setting among the runs that have it, each once."""
    values = [run.settings.get(name) for run in runs]
    return list({json.dumps(v): v for v in values if v is not None}.values())


def _setting(value: object) -> str:
    """Returns a setting's value as the settings files write it."""
    if value is None:
        return NOTHING
    return json.dumps(value) if isinstance(value, bool) else f"{value}"
