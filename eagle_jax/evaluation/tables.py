"""The tables of a report, as markdown that also reads well as plain text."""

import json

from eagle_jax.config import ChainConfig, shortest
from eagle_jax.decoding.rates import acceptance_by_depth
from eagle_jax.evaluation.runs import (
    SETUP,
    TREE,
    EvaluatedRun,
    Group,
    find_baseline,
    identical,
    speedup,
    varying,
)
from eagle_jax.reporting import NOTHING, decimals, markdown, ratio


def runs_table(runs: list[EvaluatedRun]) -> str:
    """Returns a table of all runs and of how much they answered."""
    rows = []
    for run in runs:
        answers = [answer.new_tokens for answer in run.answers.values()]
        of = f" of {len(answers) + run.missing}" if run.missing else ""
        counts = (f"{len(answers)}{of}", sum(map(len, answers)), sum(map(sum, answers)))
        settings = run.settings
        where = (run.file, settings["label"], shortest(settings["temperature"]))
        rows.append([*where, str(settings["batch_size"]), *map(str, counts)])
    sizes = ("temperature", "batch size", "questions", "turns", "tokens")
    return markdown(["file", "method", *sizes], rows)


def shared_settings(runs: list[EvaluatedRun]) -> list[str]:
    """Returns a line for each setting that is the same wherever it is given."""
    lines = []
    for name in (*SETUP, *TREE):
        values = {_setting(run.settings.get(name)) for run in runs} - {NOTHING}
        lines += [f"{name}: {value}" for value in values if len(values) == 1]
    versions = [run.settings.get("versions", {}) for run in runs]
    named = [", ".join(f"{n} {v}" for n, v in found.items()) for found in versions]
    return lines + [f"versions: {text}" for text in dict.fromkeys(named)]


def speedup_tables(group: Group) -> dict[str, str]:
    """Returns Table 1 by title: methods by tasks.

    Its columns are speedup and tau of each task, their means, and losslessness. Ablated
    runs are left to Table 3.
    """
    rows = [(name, run) for name, run in group.named if not run.is_ablated]
    return {group.title: _by_task(rows, group)} if rows else {}


def ablation_tables(group: Group) -> dict[str, str]:
    """Returns Table 3 by title, for each family of runs of which one is ablated.

    A family has everything in common but `rank_by` and `rerank`.
    """
    families: dict[str, list[EvaluatedRun]] = {}
    for run in group.runs:
        alike = run.settings | dict.fromkeys(("rank_by", "rerank", "label"))
        families.setdefault(json.dumps(alike, sort_keys=True), []).append(run)
    ablated = [f for f in families.values() if any(run.is_ablated for run in f)]
    every = [run for family in ablated for run in family]
    names = ["num_nodes", "depth", "width"]
    names += varying(every, ("method", "draft", "calibration", "acceptance"))
    result: dict[str, str] = {}
    for family in ablated:
        settings = family[0].settings
        sizes = [f"{name} {_setting(settings.get(name))}" for name in names]
        title = ", ".join([group.title, *sizes])
        rows = [(_ablation(run)[1], run) for run in sorted(family, key=_ablation)]
        result[title] = _by_task(rows, group)
    return result


def chain_acceptance_table(group: Group) -> dict[str, str]:
    """Returns acceptance by depth of chains, if any, and how often it was tried."""
    chains = [
        (name, *acceptance_by_depth(run.accepted, run.settings.get("depth") or 0))
        for name, run in group.named
        if run.row.settings is ChainConfig
    ]
    if not chains:
        return {}
    longest = max(len(tried) for _, _, tried in chains)
    rows = []
    for name, rates, tried in chains:
        pairs = zip(rates, tried, strict=True)
        cells = [f"{decimals(share, 3)} ({count:,})" for share, count in pairs]
        rows.append([name, *cells, *[NOTHING] * (longest - len(cells))])
    header = ["method", *(f"depth {n}" for n in range(1, longest + 1))]
    return {group.title: markdown(header, rows)}


def _ablation(run: EvaluatedRun) -> tuple[int, str]:
    """Returns a run's place in Table 3 and its name there."""
    by_value = run.settings.get("rank_by") != "confidence"
    is_reranked = run.settings.get("rerank") is not False
    names = ("w/o both", "w/o value", "w/o reranking", run.settings["method"])
    place = 2 * by_value + is_reranked
    return place, names[place]


def _by_task(rows: list[tuple[str, EvaluatedRun]], group: Group) -> str:
    """Returns the table of a row per run."""
    answers = [answer for _, run in rows for answer in run.answers.values()]
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    header = ["method"]
    for task in (*tasks, "mean"):
        header += [f"{task} speedup", f"{task} tau"]
    cells = [[name, *_cells(run, group, tasks)] for name, run in rows]
    return markdown([*header, "lossless"], cells)


def _cells(run: EvaluatedRun, group: Group, tasks: list[str]) -> list[str]:
    """Returns speedup and tau of each task, their means, and losslessness."""
    baseline = find_baseline(run, group.runs)
    gains = [speedup(run, baseline, task) for task in tasks]
    taus = [run.tau(task) for task in tasks]
    cells = []
    for gain, tau in zip([*gains, _mean(gains)], [*taus, _mean(taus)], strict=True):
        cells += [ratio(gain), decimals(tau)]
    same = identical(run, baseline)
    return [*cells, NOTHING if same is None else "{}/{}".format(*same)]


def _mean(values: list[float | None]) -> float | None:
    """Returns the mean over tasks, `None` if one is missing: rows are compared."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _setting(value: object) -> str:
    """Returns a setting's value as the settings files write it."""
    if value is None:
        return NOTHING
    return json.dumps(value) if isinstance(value, bool) else f"{value}"
