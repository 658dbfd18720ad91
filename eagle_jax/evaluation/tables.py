"""The papers' tables from runs, as markdown that also reads well as plain text."""

import json
from collections.abc import Callable, Iterable

from eagle_jax.config import shortest
from eagle_jax.evaluation.metrics import quartiles
from eagle_jax.evaluation.records import speed, tau
from eagle_jax.evaluation.runs import (
    SETUP,
    TREE,
    Group,
    Run,
    find_baseline,
    groups,
    identical,
    in_order,
    shared,
    speedups,
    unique_names,
    varying,
)
from eagle_jax.markdown import NOTHING, decimals, markdown, ratio, short

_MOST_DIFFERENCES = 10


def lossless(run: Run, baseline: Run | None) -> str:
    """Returns the numbers of `identical` as a cell, or that a run cannot be so."""
    if not run.is_lossless:
        return "NOT LOSSLESS"
    found = identical(run, baseline)
    return NOTHING if found is None else "{}/{}".format(*found)


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
    versions = [found for run in runs for found in run.versions]
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
    runs = [run for run in group.runs if not run.is_ablated]
    if not runs:
        return None
    return methods_by_tasks(
        runs, unique_names(runs), group.everything, with_prefill=with_prefill
    )


def temperature_tables(runs: list[Run], *, with_prefill: bool) -> dict[str, str]:
    """Returns every method at all its temperatures, side by side: means over tasks.

    A method is known by its label: its tree and its confidences may depend on the
    temperature.

    Returns:
        The tables by title, for setups with several temperatures, at the smallest
        batch size.
    """
    result = {}
    compared = groups(runs, one_batch_size=True)
    setups = list({json.dumps(group.runs[0].setup()): group for group in compared})
    for number, setup in enumerate(setups, 1):
        members = [g for g in compared if json.dumps(g.runs[0].setup()) == setup]
        if len(members) < 2:
            continue
        header, cells = ["method"], dict[str, list[list[str]]]()
        for place, group in enumerate(members):
            shown = f"T={shortest(group.runs[0].temperature)}"
            header += [f"{shown} speedup", f"{shown} tau", f"{shown} lossless"]
            for name, run in zip(group.names, group.runs, strict=True):
                row = cells.setdefault(name, [])
                row += [[NOTHING] * 3] * (place - len(row))
                row.append(_means(run, runs, with_prefill=with_prefill))
        rows = []
        for name, parts in cells.items():
            parts += [[NOTHING] * 3] * (len(members) - len(parts))
            rows.append([name, *(cell for part in parts for cell in part)])
        title = "all temperatures" + (f", setup {number}" if len(setups) > 1 else "")
        result[title] = markdown(header, rows)
    return result


def _means(run: Run, everything: list[Run], *, with_prefill: bool) -> list[str]:
    """Returns speedup and tau as means over tasks, and losslessness."""
    baseline = find_baseline(run, everything)
    gains, taus = by_task(run, baseline, run.tasks, with_prefill=with_prefill)
    return [ratio(mean(gains)), decimals(mean(taus)), lossless(run, baseline)]


def spread_table(group: Group) -> str:
    """Returns medians and quartiles over questions, by method and task."""
    header = ["method", "task", "questions", "tokens/s", "tokens/s, no prefill"]
    header += ["speedup", "speedup, no prefill", "tau of a question"]
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        baseline = find_baseline(run, group.everything)
        for task in run.tasks:
            answers = list(run.of_task(task).values())
            taus = [tau([answer]) for answer in answers]
            speeds = [
                _spread(
                    (speed([a], with_prefill=with_prefill) for a in answers),
                    short,
                )
                for with_prefill in (True, False)
            ]
            gains = [
                _spread(speedups(run, baseline, task=task, with_prefill=p), ratio)
                for p in (True, False)
            ]
            row = [name, task, str(len(answers)), *speeds, *gains]
            rows.append([*row, _spread(taus, decimals)])
    return markdown(header, rows)


def ablation_tables(runs: list[Run], *, with_prefill: bool) -> dict[str, str]:
    """Returns Table 3 for each family of EAGLE-2 runs of which one is ablated.

    A family has everything in common but `rank_by` and `rerank`.

    Returns:
        The tables by title.
    """
    names = {
        ("confidence", False): "w/o both",
        ("confidence", True): "w/o value",
        ("value", False): "w/o reranking",
        ("value", True): "eagle2",
    }
    result = {}
    for group in groups(runs, one_batch_size=False):
        eagle2 = [run for run in group.runs if run.method == "eagle2"]
        named = ["num_nodes", "depth", "width"]
        named += varying(eagle2, ("draft", "calibration", "acceptance"))
        for family in _families(eagle2, "rank_by", "rerank", "label"):
            if not any(run.is_ablated for run in family):
                continue

            def parts(run: Run) -> tuple[str, bool]:
                by_value = run.settings.get("rank_by") != "confidence"
                kind = "value" if by_value else "confidence"
                return kind, run.settings.get("rerank") is not False

            family = sorted(family, key=lambda run: list(names).index(parts(run)))
            batch = f"batch size {family[0].batch_size}"
            sizes = [f"{n} {_setting(family[0].settings.get(n))}" for n in named]
            title = ", ".join([group.title, batch, *sizes])
            result[title] = methods_by_tasks(
                family,
                [names[parts(run)] for run in family],
                runs,
                with_prefill=with_prefill,
            )
    return result


def batch_tables(runs: list[Run]) -> dict[str, str]:
    """Returns Table 7 where a method ran at several batch sizes.

    Returns:
        The tables by title: throughput and its ratio to plain decoding at the same
        batch size, and the ratio of the best throughputs over batch sizes.
    """
    result = {}
    for group in groups(runs, one_batch_size=False):
        members = [run for run in group.runs if not run.is_ablated]
        sizes = sorted({run.batch_size for run in members})
        if len(sizes) < 2:
            continue
        header = ["method"]
        for size in sizes:
            header += [f"b={size} tokens/s", f"b={size} speedup"]
        families = _families(members, "batch_size")
        names = unique_names([family[0] for family in families])
        rows = [
            [name, *_batch_cells(family, sizes, runs)]
            for name, family in zip(names, families, strict=True)
        ]
        result[group.title] = markdown([*header, "best / best plain"], rows)
    return result


def calibration_table(group: Group) -> str | None:
    """Returns a table of calibration errors, and of the nodes that trees waste.

    Returns:
        The table, `None` without nodes.
    """
    header = ["method", "tried nodes", "ECE of confidence", "ECE of value"]
    header += ["accepted below 0.05", "accepted above 0.95"]
    header += ["drafted per round", "accepted", "wasted"]
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        nodes = run.nodes()
        if nodes is None:
            continue
        bins = nodes.confidence
        errors = (bins.expected_error, nodes.values.expected_error)
        ends = (bins.rates[0], bins.rates[-1])
        if not run.has_confidence:
            errors, ends = (None, None), (None, None)
        accepted, wasted = nodes.accepted_per_round, nodes.wasted_per_round
        row = [name, f"{len(nodes.tried):,}", *(decimals(error, 3) for error in errors)]
        row += [decimals(end, 3) for end in ends]
        rows.append([*row, *map(short, (accepted + wasted, accepted, wasted))])
    return markdown(header, rows) if rows else None


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


def differences_table(group: Group) -> str | None:
    """Returns a table of where texts first leave plain decoding's, `None` for none."""
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        baseline = find_baseline(run, group.everything)
        if identical(run, baseline) is None:
            continue
        for (category, number), pair in shared(run, baseline, None).items():
            place = pair[0].difference(pair[1])
            if place is not None:
                rows.append([name, category, number, *(str(n + 1) for n in place)])
    if not rows:
        return None
    more = len(rows) - _MOST_DIFFERENCES
    header = ["method", "category", "question", "turn", "token"]
    table = markdown(header, rows[:_MOST_DIFFERENCES])
    return table + (f"\n\nand {more} more" if more > 0 else "")


def methods_by_tasks(
    runs: list[Run], names: list[str], everything: list[Run], *, with_prefill: bool
) -> str:
    """Returns a row per run: speedup and tau of each task, their mean, losslessness.

    Args:
        runs: The runs.
        names: Their names.
        everything: The runs among which plain decoding is looked for.
        with_prefill: Whether times include the prefill.
    """
    tasks = list(dict.fromkeys(task for run in runs for task in run.tasks))
    header = ["method"]
    for task in (*tasks, "mean"):
        header += [f"{task} speedup", f"{task} tau"]
    rows = []
    for name, run in zip(names, runs, strict=True):
        baseline = find_baseline(run, everything)
        gains, taus = by_task(run, baseline, tasks, with_prefill=with_prefill)
        row = [name]
        for gain, length in zip(
            [*gains, mean(gains)], [*taus, mean(taus)], strict=True
        ):
            row += [ratio(gain), decimals(length)]
        rows.append([*row, lossless(run, baseline)])
    return markdown([*header, "lossless"], rows)


def by_task(
    run: Run, baseline: Run | None, tasks: Iterable[str], *, with_prefill: bool
) -> tuple[list[float | None], list[float | None]]:
    """Returns the median speedup and tau of each task."""
    gains, taus = [], []
    for task in tasks:
        found = speedups(run, baseline, task=task, with_prefill=with_prefill)
        spread = quartiles(found)
        gains.append(None if spread is None else spread[1])
        taus.append(run.tau(task))
    return gains, taus


def _batch_cells(family: list[Run], sizes: list[int], runs: list[Run]) -> list[str]:
    """Returns one method's row of Table 7."""
    cells, ours, theirs = [], [], []
    for size in sizes:
        run = next((run for run in family if run.batch_size == size), None)
        if run is None:
            cells += [NOTHING, NOTHING]
            continue
        baseline = find_baseline(run, runs)
        both = shared(run, baseline, None).values()
        mine = speed((ours for ours, _ in both), with_prefill=True)
        plain = speed((theirs for _, theirs in both), with_prefill=True)
        whole = speed(run.answers.values(), with_prefill=True)
        cells += [short(whole), ratio(_quotient(mine, plain))]
        ours += [mine] if mine else []
        theirs += [plain] if plain else []
    # The best of fewer batch sizes than the other's would be no comparison.
    is_whole = len(ours) == len(theirs) == len(sizes)
    best = _quotient(max(ours), max(theirs)) if is_whole else None
    return [*cells, ratio(best)]


def _families(runs: list[Run], *but: str) -> list[list[Run]]:
    """Returns the runs that have all settings in common but some."""
    found: dict[str, list[Run]] = {}
    for run in in_order(runs):
        found.setdefault(run.key(*but), []).append(run)
    return list(found.values())


def _spread(
    values: Iterable[float | None], shown: Callable[[float | None], str]
) -> str:
    found = quartiles(values)
    if found is None:
        return NOTHING
    low, median, high = map(shown, found)
    return f"{median} ({low} to {high})"


def mean(values: list[float | None]) -> float | None:
    """Returns the mean over tasks, `None` if one is missing: rows are compared."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _quotient(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _given(runs: list[Run], name: str) -> list[object]:
    """Returns the values of a setting among the runs that have it, each once."""
    values = [run.settings.get(name) for run in runs]
    return list({json.dumps(v): v for v in values if v is not None}.values())


def _setting(value: object) -> str:
    """Returns a setting's value as the settings files write it."""
    if value is None:
        return NOTHING
    return json.dumps(value) if isinstance(value, bool) else f"{value}"
