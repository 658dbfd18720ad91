"""Exponents that make a draft's confidences honest, fitted to evaluation records.

    python scripts/calibrate.py RECORDS_FOLDER... --output calibration.json

The records must hold drafted nodes: `scripts/evaluate.py --nodes` writes them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from eagle_jax.cli.command import run_command
from eagle_jax.cli.files import check_writable, write_json
from eagle_jax.evaluation.calibrate import Fit, Trials, fit, read_trials


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parse(argv)
    return run_command(
        lambda: _calibrate(arguments),
        unwritable="cannot write the calibration: {error}",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fit a draft's confidences to what was accepted."
    )
    add = parser.add_argument
    add("records", type=Path, nargs="+", help="folders of scripts/evaluate.py")
    add("--output", type=Path, required=True, metavar="FILE", help="a .json file")
    add(
        "--by",
        choices=("depth", "rank"),
        default="rank",
        help="one exponent per depth and rank among siblings, or per depth",
    )
    add("--temperature", type=float, help="take only runs of this temperature")
    add("--draft", metavar="NAME", help="take only runs of this draft")
    return parser.parse_args(argv)


def _calibrate(arguments: argparse.Namespace) -> int:
    check_writable(arguments.output)
    trials = read_trials(
        arguments.records, temperature=arguments.temperature, draft=arguments.draft
    )
    fitted = fit(trials, by=arguments.by)
    result = {
        "exponents": [list(row) for row in fitted.calibration.exponents],
        "rows": len(trials),
        "ece_before": fitted.ece_before,
        "ece_after": fitted.ece_after,
        "source": [str(path) for path in arguments.records],
    }
    write_json(arguments.output, result)
    Console().print(_table(trials, fitted))
    print(
        f"wrote {arguments.output}: {len(trials):,} nodes of "
        f"{len(np.unique(trials.question))} questions | expected calibration error on "
        f"held-out questions {fitted.ece_before:.4f} before, "
        f"{fitted.ece_after:.4f} after | the exponents are fitted to all questions"
    )
    return 0


def _table(trials: Trials, fitted: Fit) -> Table:
    table = Table("depth", "nodes", "confidence", "accepted", "exponents by rank")
    for depth, row in enumerate(fitted.calibration.exponents, 1):
        level = trials.where(trials.depth == depth)
        means = ("-", "-")
        if len(level):
            confidence = np.exp(level.log_confidence).mean()
            means = (f"{confidence:.3f}", f"{level.is_accepted.mean():.3f}")
        exponents = " ".join(f"{entry:.2f}" for entry in row)
        table.add_row(str(depth), f"{len(level):,}", *means, exponents)
    return table


if __name__ == "__main__":
    sys.exit(main())
