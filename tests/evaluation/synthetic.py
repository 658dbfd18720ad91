"""Made-up files of evaluations, in the layout that scripts/evaluate.py writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.records import Record

RUN = {
    **{"method": "eagle2", "label": "eagle2", "temperature": 0.0, "top_p": 1.0},
    **{"top_k": 0, "seed": 0, "acceptance": "greedy", "batch_size": 1},
    **{"num_nodes": 60, "depth": 6, "width": 10, "rank_by": "value", "rerank": True},
    **{"calibration": None, "max_new_tokens": 64, "max_length": 512},
    **{"template": "none", "target": "toy", "draft": "toy-head", "dtype": "float32"},
    **{"device": "cpu", "versions": {"jax": "0.10.0"}},
}


def record(
    question_id: int,
    *,
    category: str = "writing",
    seconds: Sequence[float] = (2.0,),
    new_tokens: Sequence[int] = (5,),
    accept_lengths: Sequence[int] = (1, 1, 1, 1),
    token_ids: Sequence[Sequence[int]] | None = None,
    nodes: Sequence[VerifiedTree] | None = None,
    asked: int | None = None,
    **run: Any,
) -> dict[str, Any]:
    """One question's line and its run; what is not given is plain and small."""
    ids = token_ids or [list(range(number)) for number in new_tokens]
    others = len(ids) - 1
    made = Record(
        question_id=question_id,
        category=category,
        question="0" * 16,
        number=question_id,
        turns=["text"] * len(ids),
        wall_time=list(seconds),
        # All steps are the first turn's: only their sum is looked at.
        decoding_steps=[len(accept_lengths), *[0] * others],
        accept_lengths=list(accept_lengths),
        prompt_tokens=[3] * len(ids),
        token_ids=[*map(list, ids)],
        stop_reasons=["max_tokens"] * len(ids),
        nodes=None if nodes is None else tuple(nodes),
        model_id="toy",
        asked=asked,
        answer_id="a" * 22,
        tstamp=1763700000.0,
    )
    return {"run": RUN | run, **made.to_json()}


def plain(question_id: int, **fields: Any) -> dict[str, Any]:
    """One question's line of plain decoding."""
    names = ("num_nodes", "depth", "width", "rank_by", "rerank", "draft")
    tree: dict[str, Any] = dict.fromkeys(names)
    name: dict[str, Any] = {"method": "autoregressive", "label": "autoregressive"}
    return record(question_id, **(name | tree | fields))


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Writes a run's file: the settings of the first record, then all records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{n: line[n] for n in line if n != "run"} for line in records]
    lines = [{"run": line["run"]} for line in records[:1]] + lines
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_evaluation(folder: Path, *, questions: int = 6) -> Path:
    """Writes a folder of every method at two batch sizes, ablations and rejection."""
    methods: dict[str, dict[str, Any]] = {
        "autoregressive": {},
        "lookup": {},
        "chain": {"depth": 4, "width": 1, "num_nodes": 5},
        "eagle1": {"num_nodes": 4, "depth": 2},
        "eagle2": {},
        "eagle2:rerank=false": {"rerank": False},
        "eagle2:rank_by=confidence": {"rank_by": "confidence"},
    }
    cases = [(*method, 0.0, size) for method in methods.items() for size in (1, 4)]
    cases.append(("autoregressive", {}, 1.0, 1))
    cases.append(("chain:acceptance=rejection", {"acceptance": "rejection"}, 1.0, 1))
    for label, own, temperature, size in cases:
        run = {"label": label, "method": label.partition(":")[0], **own}
        run |= {"temperature": temperature, "batch_size": size}
        lines = [_answer(number, run) for number in range(questions)]
        write(folder / f"{label}-t{temperature:g}-b{size}.jsonl", lines)
    return folder


def _answer(number: int, run: dict[str, Any]) -> dict[str, Any]:
    """An answer in two turns, with the same text in every run."""
    new_tokens, depth = (40 + number, 64), run.get("depth", 6)
    is_plain, size = run["method"] == "autoregressive", run["batch_size"]
    seconds = [n * (0.005 if is_plain else 0.002) / size for n in new_tokens]
    steps = [1] * (sum(new_tokens) - 2) if is_plain else [*range(1, depth + 2)] * 4
    ranks = 1 if run["method"] == "chain" else 3
    has_nodes = size == 1 and not run["temperature"] and not is_plain
    return (plain if is_plain else record)(
        number,
        category=("writing", "math", "summarization")[number % 3],
        new_tokens=new_tokens,
        accept_lengths=steps,
        seconds=seconds,
        nodes=_nodes(depth, ranks) if has_nodes else None,
        **run,
    )


def _nodes(depth: int, ranks: int) -> list[VerifiedTree]:
    """Trees that grow below first nodes, of which more and more is accepted."""
    first = [1 + level * ranks for level in range(depth)]
    parents = np.repeat([0, *first[:-1]], ranks).tolist()
    values = [-0.5 * (place // ranks) - place % ranks for place in range(len(parents))]
    return [
        tree([-1, *parents], [0.0, *values], first[:count], 1 + len(parents))
        for count in range(depth + 1)
    ]


def tree(
    parents: list[int], log_values: list[float], accepted: list[int], size: int
) -> VerifiedTree:
    """A verified tree, with padding up to a size."""
    padding = size - len(parents)
    return VerifiedTree(
        parents=np.array(parents + [-1] * padding),
        log_values=np.array(log_values + [-np.inf] * padding),
        accepted=accepted,
    )
