"""Finds the tree that pays on this machine, for a pair and a batch size.

    eagle-jax tune
    eagle-jax tune --target FOLDER --draft FOLDER --prompts FILE --batch-size 4
    eagle-jax tune --grid "3/2/1 8/7/1 10/4/4"
    eagle-jax tune --method lookup --target FOLDER --prompts FILE

It runs a few trees for real, in turns with plain decoding, drops the slower half, and
so on until two are left. Without a target it tunes the embedded pair. The file that it
writes is for `eagle-jax generate --config`.
"""

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.pair_flags import add_pair_flags, complete_pair, fitting_prompts
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, check_read, join_settings
from eagle_jax.config import DecodingConfig, require
from eagle_jax.errors import InputError
from eagle_jax.files import write_whole
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.pair import load_pair
from eagle_jax.generation.pairs import LoadedPair
from eagle_jax.methods import METHODS, PLAIN
from eagle_jax.tuning.contest import MOST_TREES, Contest, Trial, settings_file
from eagle_jax.tuning.trees import parse_grid, settings, show, sizes


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(
        lambda: _tune(_parse(argv)), unwritable="cannot write the settings: {error}"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Find the tree that pays.")
    add_pair_flags(parser)
    add = parser.add_argument
    add(
        "--method",
        choices=[name for name, row in METHODS.items() if row.trials],
        default=DecodingConfig.method,
    )
    add(
        "--calibration",
        metavar="FILE",
        help="of eagle-jax calibrate; default the head's own, none for none",
    )
    add_settings(parser, GenerateConfig, "draft_vocabulary")
    add("--num-prompts", type=int, default=16, help="take as many, evenly spread")
    add("--max-new-tokens", type=int, default=64, help="tokens per prompt")
    add("--temperature", type=float, default=0.0)
    add("--batch-size", type=int, default=1)
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--grid", metavar="TREES", help='only these, such as "8/7/1 60/6/10"')
    add("--repeats", type=int, default=2, help="measurements before a half is dropped")
    add("--output", type=Path, default=Path("tuned.toml"), metavar="FILE")
    return parser.parse_args(argv)


def _tune(arguments: argparse.Namespace) -> int:
    config = _check(arguments)
    trees, rule = _settings(arguments, config), config.sampling.rule
    config = dataclasses.replace(config, tree=trees[0])
    pair = load_pair(arguments.target, arguments.draft, config, is_lazy=True)
    for tree in trees:
        pair.source.with_settings(tree, rule).check_memory(
            batch_size=arguments.batch_size, max_length=1 + arguments.max_new_tokens
        )
    prompts = fitting_prompts(arguments, pair, arguments.max_new_tokens)
    prompts = _choose(prompts, arguments)
    say(f"loading {arguments.target}")
    runner = pair.runner(prompts, config, arguments.batch_size)
    contest = Contest(
        plain=dataclasses.replace(runner, drafter=None),
        drafter_of=lambda tree: pair.source.make_drafter(tree, rule),
        prompts=prompts,
        repeats=arguments.repeats,
        progress=progress,
    )
    trials = contest.run(trees)
    Console().print(_table(config, trials))
    comments = _origin(arguments, pair.loaded, len(prompts))
    write_whole(arguments.output, settings_file(trials[0], config, comments))
    _print_best(arguments.output, config, trials[0])
    return 0


def _check(arguments: argparse.Namespace) -> GenerateConfig:
    """Refuses flags that cannot be run, before long work; returns the settings."""
    check_writable(arguments.output)
    for name, least in (("num_prompts", 1), ("repeats", 1), ("max_new_tokens", 2)):
        value, flag = getattr(arguments, name), "--" + name.replace("_", "-")
        require(value >= least, flag, value, f"at least {least}")
    config = join_settings(GenerateConfig, None, arguments)
    complete_pair(arguments)
    for flag, name in (("grid", "num_nodes"), ("calibration", "calibration")):
        if getattr(arguments, flag) is not None:
            check_read(config, name, flag)
    return config


def _settings(arguments: argparse.Namespace, config: GenerateConfig) -> list[Any]:
    """Returns the settings that are tried."""
    grid = None if arguments.grid is None else parse_grid(arguments.grid)
    trees = settings(config.method, grid)
    if len(trees) > MOST_TREES:
        raise InputError(
            f"--grid gives {arguments.method} {len(trees)} settings to run, and at "
            f"most {MOST_TREES} are run in turns; name fewer trees"
        )
    if arguments.calibration is None:
        return trees
    calibration = arguments.calibration
    return [dataclasses.replace(tree, calibration=calibration) for tree in trees]


def _choose(prompts: list[list[int]], arguments: argparse.Namespace) -> list[list[int]]:
    """Returns as many prompts as are wanted, taken evenly from all."""
    if len(prompts) < arguments.batch_size:
        raise InputError(
            f"{arguments.prompts} has {len(prompts)} prompts that fit, for "
            f"--batch-size {arguments.batch_size}; give more prompts"
        )
    count = max(min(arguments.num_prompts, len(prompts)), arguments.batch_size)
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _table(config: GenerateConfig, trials: Sequence[Trial]) -> Table:
    """Returns a table of trees beside plain decoding."""
    method, size = config.method, config.decoding.batch_size
    table = Table(
        "/".join(sizes(method)),
        "measurements",
        "tokens/round",
        "speedup",
        title=f"{method.name}, batch size {size}, {jax.devices()[0].device_kind}",
    )
    for trial in trials:
        table.add_row(
            show(trial.tree, method),
            str(trial.measurements),
            f"{trial.tokens_per_round:.3f}",
            f"{trial.speedup:.2f}",
        )
    table.add_row("plain decoding", "", "1.000", "1.00")
    return table


def _origin(
    arguments: argparse.Namespace, pair: LoadedPair, num_prompts: int
) -> list[str]:
    """Returns the lines that say where the figures come from."""
    version = importlib.metadata.version("jax")
    return [
        f"eagle-jax tune, {jax.devices()[0].device_kind}, texts in "
        f"{pair.target.dtype}, jax {version}",
        f"target {arguments.target}"
        + (f", draft {arguments.draft}" if arguments.draft else ""),
        f"{num_prompts} prompts of {arguments.prompts}, {arguments.max_new_tokens} "
        f"tokens each, temperature {arguments.temperature:g}",
    ]


def _print_best(output: Path, config: GenerateConfig, best: Trial) -> None:
    """Prints in one line what is in the settings file."""
    found = show(best.tree, config.method)
    if best.speedup > 1:
        print(f"{found}: {best.speedup:.2f} times the speed of plain decoding")
    else:
        print(
            f"no tree pays here: {found}, the best, has {best.speedup:.2f} times the "
            f'speed of plain decoding; use method = "{PLAIN.name}"'
        )
    print(f"wrote {output}, for eagle-jax generate --config")
