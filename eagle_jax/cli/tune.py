"""Finds the tree that pays on this machine, for a pair and a batch size.

    eagle-jax tune
    eagle-jax tune --target FOLDER --draft FOLDER --prompts FILE --batch-size 4
    eagle-jax tune --grid "3/2/1 8/7/1 10/4/4"
    eagle-jax tune --method medusa --target FOLDER --draft FOLDER --prompts FILE
    eagle-jax tune --method lookup --target FOLDER --prompts FILE

It runs a few trees for real, in turns with plain decoding, drops the slower half, and
so on until two are left. For methods whose tree is static it first measures how often
drafts of each depth and rank are right, and runs the best trees of a few sizes. Without
a target it tunes the embedded pair. The file that it writes is for `eagle-jax generate
--config`.
"""

import argparse
import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Sequence
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
from eagle_jax.decoding.requests import bucket_length
from eagle_jax.drafting import RecyclingDrafter, TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.files import is_special, write_whole
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.generation.runner import Runner
from eagle_jax.interface import Drafter
from eagle_jax.methods import METHODS, PLAIN
from eagle_jax.tree import Topology
from eagle_jax.tuning import static
from eagle_jax.tuning.contest import MOST_TREES, Contest, Tree, Trial, settings_file
from eagle_jax.tuning.trees import parse_grid, settings, show, sizes

_STATIC = [name for name, row in METHODS.items() if row.tree is not None]
_MAX_NODES = 64


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
        choices=[name for name, row in METHODS.items() if row.is_tuned],
        default=DecodingConfig.method,
        help="the tree of eagle1, medusa, hydra and recycling is static: its paths go "
        "into a JSON file beside the settings",
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
    add("--max-nodes", type=int, help="largest static tree, root included; default 64")
    add("--max-depth", type=int, help="deepest static tree; default 8")
    add("--repeats", type=int, default=2, help="measurements before a half is dropped")
    add("--output", type=Path, default=Path("tuned.toml"), metavar="FILE")
    return parser.parse_args(argv)


def _tune(arguments: argparse.Namespace) -> int:
    config = _check(arguments)
    given = _settings(arguments, config)
    source = open_pair(
        arguments.target,
        arguments.draft,
        dataclasses.replace(config, tree=given[0]),
    )
    drafter_of = _drafters(source, config)
    trees: list[Tree] = [*given]
    if config.method.tree is not None:
        assert source.drafter is not None, "plain decoding is not tuned"
        depth = arguments.max_depth or static.MAX_DEPTH
        trees = [static.recorded_tree(source.drafter, depth)]
    for tree in trees:
        dataclasses.replace(source, drafter=drafter_of(tree)).check_memory(
            batch_size=arguments.batch_size, max_length=1 + arguments.max_new_tokens
        )
    prompts = fitting_prompts(arguments, source, arguments.max_new_tokens)
    prompts = _choose(prompts, arguments)
    say(f"loading {arguments.target}")
    pair = source.load()
    contest = Contest(
        plain=_plain_runner(pair, config, prompts),
        drafter_of=drafter_of,
        prompts=prompts,
        repeats=arguments.repeats,
        progress=progress,
    )
    if isinstance(trees[0], Topology):
        rates = static.measure_rates(contest, trees[0])
        nodes = arguments.max_nodes or _MAX_NODES
        trees = [*static.static_trees(rates, max_nodes=nodes)]
    trials = contest.run(trees)
    Console().print(_table(config, trials))
    comments = _origin(arguments, pair, len(prompts))
    _write(arguments.output, config, trials[0], comments)
    return 0


def _check(arguments: argparse.Namespace) -> GenerateConfig:
    """Refuses flags that cannot be run, before long work; returns the settings."""
    check_writable(arguments.output)
    for name, least in (
        ("num_prompts", 1),
        ("max_depth", 1),
        ("repeats", 1),
        ("max_nodes", 2),
        ("max_new_tokens", 2),
    ):
        value = getattr(arguments, name)
        holds = value is None or value >= least
        require(holds, "--" + name.replace("_", "-"), value, f"at least {least}")
    config = join_settings(GenerateConfig, None, arguments)
    complete_pair(arguments)
    method = arguments.method
    if config.method.tree is not None:
        if is_special(arguments.output):
            raise InputError(
                f"`output` {arguments.output} is no file, and the tree of {method} is "
                "written beside it; give a file name"
            )
        depth, wanted = arguments.max_depth or 1, f"at most {static.MAX_DEPTH}"
        fits = depth <= static.MAX_DEPTH
        require(fits, "--max-depth", depth, f"{wanted} for a static tree")
    elif arguments.max_nodes is not None or arguments.max_depth is not None:
        raise InputError(
            "--max-nodes and --max-depth are for methods whose tree is static: "
            f"{', '.join(_STATIC)}; leave them out for {method}"
        )
    for flag, name in (("grid", "num_nodes"), ("calibration", "calibration")):
        if getattr(arguments, flag) is not None:
            check_read(config, name, flag)
    return config


def _settings(arguments: argparse.Namespace, config: GenerateConfig) -> list[Any]:
    """Returns the settings that may be tried; a static tree has only its defaults."""
    if config.method.tree is not None:
        return [config.tree]
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


def _drafters(source: PairSource, config: GenerateConfig) -> Callable[[Tree], Drafter]:
    """Returns the function from a tree to the pair's drafter that grows it."""
    rule = config.sampling.rule

    def drafter_of(tree: Tree) -> Drafter:
        if isinstance(tree, Topology):
            drafter = source.drafter
            assert isinstance(drafter, TreeDrafter | RecyclingDrafter), "it is static"
            return dataclasses.replace(drafter, tree=tree)
        made = source.make_drafter(tree, rule)
        assert made is not None, "plain decoding is not tuned"
        return made

    return drafter_of


def _choose(prompts: list[list[int]], arguments: argparse.Namespace) -> list[list[int]]:
    """Returns as many prompts as are wanted, taken evenly from all."""
    if len(prompts) < arguments.batch_size:
        raise InputError(
            f"{arguments.prompts} has {len(prompts)} prompts that fit, for "
            f"--batch-size {arguments.batch_size}; give more prompts"
        )
    count = max(min(arguments.num_prompts, len(prompts)), arguments.batch_size)
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _plain_runner(
    pair: LoadedPair, config: GenerateConfig, prompts: list[list[int]]
) -> Runner:
    longest = max(map(len, prompts))
    return Runner(
        pair=pair,
        drafter=None,
        config=config,
        max_length=longest + config.decoding.max_new_tokens,
        prompt_bucket=bucket_length(longest),
        batch_size=config.decoding.batch_size,
    )


def _table(config: GenerateConfig, trials: Sequence[Trial]) -> Table:
    """Returns a table of trees beside plain decoding."""
    method, size = config.method, config.decoding.batch_size
    is_static = isinstance(trials[0].tree, Topology)
    table = Table(
        "nodes/depth" if is_static else "/".join(sizes(method)),
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


def _write(
    output: Path, config: GenerateConfig, best: Trial, comments: Sequence[str]
) -> None:
    """Writes the settings file, and prints in one line what is in it."""
    choices = output.with_suffix(".choices.json")
    if isinstance(best.tree, Topology) and best.speedup > 1:
        write_whole(choices, json.dumps(best.tree.paths) + "\n")
    text = settings_file(
        best, config, choices=f"{choices.resolve()}", comments=comments
    )
    write_whole(output, text)
    found = show(best.tree, config.method)
    if best.speedup > 1:
        print(f"{found}: {best.speedup:.2f} times the speed of plain decoding")
    else:
        print(
            f"no tree pays here: {found}, the best, has {best.speedup:.2f} times the "
            f'speed of plain decoding; use method = "{PLAIN.name}"'
        )
    print(f"wrote {output}, for eagle-jax generate --config")
