"""The papers' own figures, and tables that show them beside those of runs.

Nothing here was measured by this package. EAGLE-2 does not say on which device its
speedups were measured; they are ratios to plain decoding on the same one.
"""

from eagle_jax.evaluation.runs import METHODS, Group, Run, find_baseline
from eagle_jax.evaluation.tables import by_task, lossless, mean
from eagle_jax.markdown import NOTHING, decimals, markdown, ratio

TASKS = {
    "MT-bench": ("mt_bench",),
    "HumanEval": ("humaneval", "code"),
    "GSM8K": ("gsm8k", "math_reasoning"),
    "Alpaca": ("alpaca",),
    "CNN/DM": ("summarization", "sum"),
    "Natural Ques.": ("qa",),
}
"""The six tasks of EAGLE-2's Table 1, and the names that records have for them: first
those of the EAGLE repository's questions, then Spec-Bench's."""

_NAMES = {
    "small-model": "SpS",
    "lookup": "PLD",
    "medusa": "Medusa",
    "lookahead": "Lookahead",
    "hydra": "Hydra",
    "eagle1": "EAGLE",
    "eagle2": "EAGLE-2",
}
"""The names that EAGLE-2's Table 1 has for methods."""

_TABLE_1 = {
    0.0: """
Vicuna 13B
SpS 1.93 2.27 2.23 2.57 1.77 2.01 1.76 2.03 1.93 2.33 1.66 1.88 1.88 2.18
PLD 1.58 1.63 1.85 1.93 1.68 1.73 1.16 1.19 2.42 2.50 1.14 1.17 1.64 1.69
Medusa 2.07 2.59 2.50 2.78 2.23 2.64 2.08 2.45 1.71 2.09 1.81 2.10 2.07 2.44
Lookahead 1.65 1.69 1.71 1.75 1.81 1.90 1.46 1.51 1.46 1.50 1.36 1.39 1.58 1.62
Hydra 2.88 3.65 3.28 3.87 2.93 3.66 2.86 3.53 2.05 2.81 2.11 2.88 2.69 3.40
EAGLE 3.07 3.98 3.58 4.39 3.08 3.97 3.03 3.95 2.49 3.52 2.42 3.11 2.95 3.82
EAGLE-2 4.26 4.83 4.96 5.41 4.22 4.79 4.25 4.89 3.40 4.21 3.13 3.74 4.04 4.65
LLaMA2-Chat 13B
PLD 1.42 1.46 1.63 1.70 1.41 1.44 1.16 1.20 1.42 1.45 1.12 1.15 1.36 1.40
Lookahead 1.58 1.64 1.80 1.85 1.65 1.69 1.47 1.50 1.46 1.53 1.42 1.45 1.56 1.61
EAGLE 3.03 3.90 3.76 4.52 3.20 4.03 3.01 3.83 2.70 3.59 2.83 3.47 3.09 3.89
EAGLE-2 4.21 4.75 5.00 5.52 4.31 4.90 4.13 4.61 3.45 4.24 3.51 4.04 4.10 4.68
Vicuna 7B
SpS 1.82 2.36 1.99 2.61 1.71 2.26 1.65 2.21 1.81 2.44 1.60 2.16 1.76 2.34
PLD 1.61 1.68 1.82 1.87 1.82 1.99 1.21 1.31 2.53 2.72 1.23 1.44 1.70 1.84
Medusa 1.91 2.52 2.02 2.67 1.89 2.59 1.79 2.48 1.42 2.02 1.51 2.09 1.76 2.40
Lookahead 1.63 1.69 1.72 1.77 1.84 1.99 1.38 1.57 1.44 1.53 1.45 1.60 1.58 1.69
Hydra 2.69 3.60 2.98 3.79 2.73 3.66 2.66 3.58 2.01 2.70 2.25 2.86 2.55 3.37
EAGLE 2.90 3.94 3.33 4.29 3.01 4.00 2.79 3.89 2.33 3.42 2.31 3.21 2.78 3.79
EAGLE-2 3.62 4.98 3.95 5.33 3.63 4.97 3.46 4.86 2.94 4.12 2.76 3.82 3.39 4.68
LLaMA2-Chat 7B
PLD 1.38 1.43 1.52 1.59 1.32 1.37 1.15 1.19 1.48 1.52 1.15 1.20 1.33 1.38
Lookahead 1.61 1.66 1.72 1.77 1.58 1.65 1.49 1.52 1.49 1.54 1.48 1.53 1.56 1.61
EAGLE 2.78 3.62 3.17 4.24 2.91 3.82 2.78 3.71 2.43 3.41 2.61 3.44 2.78 3.71
EAGLE-2 3.43 4.70 4.03 5.39 3.52 4.77 3.45 4.66 3.01 4.12 3.15 4.19 3.43 4.64
""",
    1.0: """
Vicuna 13B
SpS 1.62 1.84 1.72 1.97 1.46 1.73 1.52 1.78 1.66 1.89 1.43 1.70 1.55 1.82
EAGLE 2.32 3.20 2.65 3.63 2.57 3.60 2.45 3.57 2.23 3.26 2.14 3.06 2.39 3.39
EAGLE-2 3.80 4.40 4.22 4.89 3.77 4.41 3.78 4.37 3.25 3.97 3.07 3.54 3.65 4.26
LLaMA2-Chat 13B
EAGLE 2.68 3.45 2.89 3.78 2.82 3.67 2.66 3.55 2.41 3.39 2.37 3.31 2.64 3.53
EAGLE-2 3.92 4.51 4.58 5.29 4.21 4.80 3.85 4.48 3.31 4.08 3.43 3.89 3.88 4.51
Vicuna 7B
SpS 1.50 1.87 1.55 1.95 1.53 1.82 1.56 1.85 1.63 1.91 1.33 1.72 1.52 1.85
EAGLE 2.13 3.17 2.39 3.43 2.34 3.29 2.21 3.30 2.08 3.12 1.95 2.86 2.18 3.20
EAGLE-2 3.05 4.28 3.33 4.65 3.07 4.49 3.08 4.43 2.63 3.76 2.48 3.56 2.94 4.20
LLaMA2-Chat 7B
EAGLE 2.22 3.30 2.61 3.79 2.40 3.52 2.29 3.33 2.19 3.15 2.22 3.12 2.32 3.37
EAGLE-2 3.19 4.41 3.67 5.06 3.35 4.62 3.20 4.48 2.73 3.85 2.81 4.01 3.15 4.41
""",
}
"""EAGLE-2 (arXiv 2406.16858), Table 1, by temperature: for each of its models and
methods speedup and tau of the six tasks, then of their mean."""

_TABLE_5 = {
    "Vicuna 7B": ("3.20", "3.94", "+0.74"),
    "Vicuna 13B": ("3.23", "3.98", "+0.75"),
    "Vicuna 33B": ("2.97", "3.68", "+0.71"),
    "LLaMA2-Chat 7B": ("3.00", "3.62", "+0.62"),
    "LLaMA2-Chat 13B": ("3.18", "3.90", "+0.68"),
    "LLaMA2-Chat 70B": ("3.12", "3.81", "+0.69"),
}
"""EAGLE-1 (arXiv 2401.15077), Table 5, as printed: tau of chain and tree and what the
tree adds, on MT-bench at temperature 0."""


def table_1(temperature: float) -> dict[str, dict[str, list[str]]]:
    """Returns the cells of EAGLE-2's Table 1 at a temperature.

    Returns:
        By model and by the paper's name of a method fourteen cells: speedup and tau of
        the six tasks and of their mean. Empty where the paper has no such temperature.
    """
    found: dict[str, dict[str, list[str]]] = {}
    model = ""
    for line in _TABLE_1.get(temperature, "").strip().splitlines():
        name, *cells = line.split(" ")
        if len(cells) < 2 * len(TASKS):
            model = line
            continue
        cells[::2] = [f"{cell}x" for cell in cells[::2]]
        found.setdefault(model, {})[name] = cells
    return found


def whole_table_1(group: Group) -> str | None:
    """Returns EAGLE-2's Table 1 of a group's runs, with the paper's rows below ours.

    Args:
        group: The runs; ablated ones are left to Table 3.

    Returns:
        The table, prefill included; `None` if no run drafts, or holds one of the six
        tasks.
    """
    runs = [
        (name, run)
        for name, run in zip(group.names, group.runs, strict=True)
        if not run.is_ablated and any(_tasks(run))
    ]
    if all(run.is_baseline for _, run in runs):
        return None
    header = ["method", "figures"]
    for task in (*TASKS, "mean"):
        header += [f"{task} speedup", f"{task} tau"]
    theirs = table_1(group.runs[0].temperature)
    rows: list[list[str]] = []
    for method in METHODS:
        rows += [_ours(name, run, group) for name, run in runs if run.method == method]
        paper = _NAMES.get(method, "")
        rows += [
            [paper, f"paper, {model}", *figures[paper], NOTHING]
            for model, figures in theirs.items()
            if paper in figures
        ]
    return markdown([*header, "lossless"], rows)


def chain_tables(group: Group) -> dict[str, str]:
    """Returns EAGLE-1's Table 5 for each chain and tree of equal depth, tau by task.

    Both take as many passes of target and head per round; the tree verifies more nodes.

    Returns:
        The tables by title; on MT-bench at temperature 0 with the paper's figures.
    """
    result = {}
    same = ("depth", "draft", "draft_fingerprint", "acceptance", "shared_noise")
    named = list(zip(group.names, group.runs, strict=True))
    for chain_name, chain in named:
        for tree_name, tree in named:
            is_pair = chain.method == "chain" and tree.method in ("eagle1", "eagle2")
            given = [[run.settings.get(name) for name in same] for run in (chain, tree)]
            if not is_pair or tree.is_ablated or given[0] != given[1]:
                continue
            rows = []
            for task in tree.tasks:
                both = chain.tau(task), tree.tau(task)
                gain = None if None in both else both[1] - both[0]
                shown = NOTHING if gain is None else f"{gain:+.2f}"
                rows.append([task, "ours", *map(decimals, both), shown])
                if task == "mt_bench" and group.runs[0].temperature == 0:
                    rows += [
                        [task, f"paper, {model}", *cells]
                        for model, cells in _TABLE_5.items()
                    ]
            header = ["task", "figures", "chain", "tree", "gain"]
            title = f"{group.title}: {chain_name} and {tree_name}"
            result[title] = markdown(header, rows)
    return result


def _tasks(run: Run) -> list[str]:
    """Returns the run's name for each of the six tasks, "" for those that it lacks."""
    known = run.tasks
    return [
        next((name for name in names if name in known), "") for names in TASKS.values()
    ]


def _ours(name: str, run: Run, group: Group) -> list[str]:
    """Returns a run's row of Table 1."""
    baseline = find_baseline(run, group.everything)
    gains, taus = by_task(run, baseline, _tasks(run), with_prefill=True)
    row = [name, "ours"]
    for gain, tau in zip([*gains, mean(gains)], [*taus, mean(taus)], strict=True):
        row += [ratio(gain), decimals(tau)]
    return [*row, lossless(run, baseline)]
