"""Finds the tree that pays on this machine, for a pair and a batch size.

    eagle-jax tune
    eagle-jax tune --target FOLDER --draft FOLDER --prompts FILE --batch-size 4
    eagle-jax tune --grid "3/2/1 8/7/1 10/4/4"
    eagle-jax tune --method lookup --target FOLDER --prompts FILE

It runs a few trees for real, in turns with plain decoding, drops the slower half, and
so on until two are left. Without a target it tunes the embedded pair.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from eagle_jax.cli.command import Parser, command
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.pair_flags import add_pair_flags, open_measured
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.config import require
from eagle_jax.engine import PairConfig
from eagle_jax.evaluation.tune import (
    Trial,
    parse_grid,
    run_trials,
    settings_file,
    show,
    sizes,
    verdict,
)
from eagle_jax.files import write_whole
from eagle_jax.methods import METHODS


@command(unwritable="cannot write the settings: {error}")
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    check_writable(arguments.output)
    for name, least in (("num_prompts", 1), ("repeats", 1), ("max_new_tokens", 2)):
        value, flag = getattr(arguments, name), "--" + name.replace("_", "-")
        require(value >= least, flag, value, f"at least {least}")
    config = join_settings(None, arguments)
    size = config.batch_size
    trees = _trees(arguments, config)
    largest = max(trees, key=lambda tree: getattr(tree, "num_nodes", 0))
    config = dataclasses.replace(config, tree=largest)
    pair, prompts = open_measured(arguments, config, least=size)
    count = max(min(arguments.num_prompts, len(prompts)), size)
    prompts = [prompts[i * len(prompts) // count] for i in range(count)]
    pairs = {None: pair.with_drafter(None)} | {
        tree: dataclasses.replace(pair, config=config.with_(tree=tree))
        for tree in trees
    }
    trials = run_trials(pairs, prompts, arguments.repeats, progress, batch_size=size)
    Console().print(_table(config, trials))
    draft = f", draft {arguments.draft}" if arguments.draft else ""
    comments = [
        f"eagle-jax tune, {jax.devices()[0].device_kind}, texts in "
        f"{pair.dtype}, jax {jax.__version__}",
        f"target {arguments.target}{draft}",
        f"{count} prompts of {arguments.prompts}, {arguments.max_new_tokens} tokens "
        f"each, temperature {arguments.temperature:g}",
    ]
    write_whole(arguments.output, settings_file(trials[0], config, comments))
    print(verdict(trials[0], config.method_row))
    print(f"wrote {arguments.output}, for eagle-jax generate --config")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_pair_flags(parser)
    add = parser.add_argument
    tried = [name for name, row in METHODS.items() if row.trials]
    what = "the method whose settings are tried"
    add("--method", choices=tried, default=PairConfig.method, help=what)
    origin = "of eagle-jax calibrate; default the head's own, none for none"
    add("--calibration", metavar="FILE", help=origin)
    names = ("draft_vocabulary", "batch_size", "dtype", "max_new_tokens", "temperature")
    usual = {"max_new_tokens": 64, "temperature": 0.0}
    add_settings(parser, PairConfig, *names, usual=usual)
    add("--num-prompts", type=int, default=16, help="take as many, evenly spread")
    form = (
        'only these, in the form of the table that it prints, such as "8/7/1 60/6/10"'
    )
    add("--grid", metavar="SETTINGS", help=form)
    add("--repeats", type=int, default=2, help="measurements before a half is dropped")
    output, written = Path("tuned.toml"), "the settings, for --config"
    add("--output", type=Path, default=output, metavar="FILE", help=written)
    return parser.parse_args(argv)


def _trees(arguments: argparse.Namespace, config: PairConfig) -> Sequence[Any]:
    """Returns the settings that are tried."""
    trees: Sequence[Any] = config.method_row.trials
    if arguments.grid is not None:
        trees = parse_grid(arguments.grid, config.method_row)
    if arguments.calibration is None:
        return trees
    config.check_reads("calibration")
    given = {"calibration": arguments.calibration}
    return [dataclasses.replace(tree, **given) for tree in trees]


def _table(config: PairConfig, trials: Sequence[Trial]) -> Table:
    """Returns a table of trees beside plain decoding."""
    method, size = config.method_row, config.batch_size
    table = Table(
        "/".join(sizes(method)),
        "tokens/round",
        "speedup",
        title=f"{method.name}, batch size {size}, {jax.devices()[0].device_kind}",
    )
    for trial in trials:
        table.add_row(
            show(trial.tree, method),
            f"{trial.tokens_per_round:.3f}",
            f"{trial.speedup:.2f}",
        )
    table.add_row("plain decoding", "1.000", "1.00")
    return table
