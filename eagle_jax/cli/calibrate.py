"""A calibration of a draft's confidences, fitted to evaluation records.

    eagle-jax calibrate RECORDS_FOLDER... --output calibration.json

The records must hold drafted trees of uncalibrated confidences, at temperature 0, above
it, or both, such as `eagle-jax evaluate --nodes --temperatures 0 1 --methods
eagle2:num_nodes=60,depth=8,width=6,kappa=1 eagle2:num_nodes=60,depth=8,width=6,kappa=2`
writes them. Levels and ranks are fitted as far as these trees have them, and no deeper
tree can be calibrated with the fit. Every second question judges a fit to the
others; the calibration that is written is fitted to all. As `calibration.json` in the
folder of a head, it is used by default.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eagle_jax.checkpoints.heads import Kind
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable
from eagle_jax.config import require
from eagle_jax.evaluation.calibrate import (
    PLAIN,
    Fit,
    calibration_file,
    describe,
    fit,
    read_observed,
)
from eagle_jax.files import write_json


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(
        lambda: _calibrate(_parse(argv)),
        unwritable="cannot write the calibration: {error}",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Fit a draft's confidences to what was accepted.")
    add = parser.add_argument
    add("records", type=Path, nargs="+", help="folders of eagle-jax evaluate")
    add("--output", type=Path, required=True, metavar="FILE", help="a .json file")
    add(
        "--by",
        choices=("depth", "rank"),
        default="rank",
        help="one exponent per depth and rank among siblings, or per depth",
    )
    add(
        "--temperature",
        type=float,
        help="of sampled runs, take only those of this temperature",
    )
    add("--draft", metavar="NAME", help="take only runs of this draft")
    add(
        "--num-nodes",
        type=int,
        help="of the trees that are compared, cut from the recorded ones; default half",
    )
    return parser.parse_args(argv)


def _calibrate(arguments: argparse.Namespace) -> int:
    check_writable(arguments.output)
    nodes = arguments.num_nodes
    if nodes is not None:
        require(nodes >= 2, "--num-nodes", nodes, "2 or more")
    vocab_size, observed = read_observed(
        arguments.records, temperature=arguments.temperature, draft=arguments.draft
    )
    fits: dict[Kind, Fit] = {
        kind: fit(
            runs,
            by=arguments.by,
            plain=PLAIN[kind],
            num_nodes=nodes,
        )
        for kind, runs in observed.items()
    }
    source = [str(path) for path in arguments.records]
    write_json(arguments.output, calibration_file(vocab_size, fits, source))
    for kind in PLAIN:
        if kind not in fits:
            say(
                f"warning: no records of {kind} text: {arguments.output} leaves its "
                "confidences as they are"
            )
    for kind, fitted in fits.items():
        Console().print(_table(kind, fitted))
    for kind, fitted in fits.items():
        print(f"{kind}: {describe(fitted)}")
    print(f"wrote {arguments.output}: fitted to all questions")
    return 0


def _table(kind: Kind, fitted: Fit) -> Table:
    table = Table("depth", "exponents by rank", title=f"{kind} text")
    for depth, row in enumerate(fitted.confidence.exponents, 1):
        table.add_row(str(depth), " ".join(f"{entry:.2f}" for entry in row))
    return table
