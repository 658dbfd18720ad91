"""Finds the tree that pays on this machine, for a pair and a batch size.

    eagle-jax tune
    eagle-jax tune --target FOLDER --draft FOLDER --prompts FILE --batch-size 4
    eagle-jax tune --sweep --grid "3/2/1 8/7/1 10/4/4"
    eagle-jax tune --method medusa --target FOLDER --draft FOLDER --prompts FILE

It times the parts of a round, records once what the draft proposes and the target
writes, ranks a grid of trees by both, and runs the best few for real beside plain
decoding. For methods whose tree is static it measures how often drafts of each depth
and rank are right, and runs the best trees of a few sizes. What drafts from the text so
far (lookup, lookahead, recycling, eagle2+lookup) has no costs and rates per level to
predict from: compare its settings with `eagle-jax evaluate`. Without a target it tunes
the embedded pair. The file that it writes is for `eagle-jax generate --config`.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from eagle_jax import assets
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable, read_prompts
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.config import GenerateConfig, TreeConfig, require
from eagle_jax.decoding.requests import bucket_prompt
from eagle_jax.drafting import TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.files import write_whole
from eagle_jax.generation import text
from eagle_jax.generation.methods import check_draft
from eagle_jax.generation.pairs import (
    LoadedPair,
    PairSource,
    open_pair,
)
from eagle_jax.generation.runner import Runner
from eagle_jax.markdown import decimals
from eagle_jax.tree import Topology
from eagle_jax.tuning import contest, static
from eagle_jax.tuning.costs import StepCosts
from eagle_jax.tuning.prediction import finalists, grid, parse_grid, predict, show

_EMBEDDED_PROMPTS = Path(assets.__file__).parent / "prompts.json"
_STATIC = ("eagle1", "medusa", "hydra")

_Tuned = tuple[LoadedPair, list[list[int]], list[contest.Entry]]
"""A pair, its prompts, and the trees that were run, the quickest first."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(
        lambda: _tune(_parse(argv)), unwritable="cannot write the settings: {error}"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Find the tree that pays.")
    add = parser.add_argument
    add("--target", help="a Hugging Face folder or hub name; default the embedded pair")
    add("--draft", help="its EAGLE head, Medusa or Hydra heads, or a smaller model")
    add(
        "--method",
        choices=("eagle2", "small-model", *_STATIC),
        default="eagle2",
        help="the tree of eagle1, medusa and hydra is static: its paths go into a JSON "
        "file beside the settings",
    )
    add("--prompts", type=Path, help=".txt (a line each), .json list or .jsonl")
    add("--chat", action="store_true", help="wrap prompts in the chat template")
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
    add("--max-nodes", type=int, default=64, help="largest tree, root included")
    add("--max-depth", type=int, default=8, help="deepest tree")
    add("--grid", metavar="TREES", help='only these, such as "8/7/1 60/6/10"')
    add("--sweep", action="store_true", help="with --grid: run all of them for real")
    add("--finalists", type=int, default=5, help="trees that are run for real")
    add("--repeats", type=int, default=5, help="measurements of each")
    add("--output", type=Path, default=Path("tuned.toml"), metavar="FILE")
    arguments = parser.parse_args(argv)
    has_embedded = arguments.method not in ("medusa", "hydra")
    if has_embedded and arguments.target is None and arguments.draft is None:
        arguments.target = str(assets.TARGET)
        is_small = arguments.method == "small-model"
        arguments.draft = str(assets.SMALL if is_small else assets.HEAD)
        arguments.prompts = arguments.prompts or _EMBEDDED_PROMPTS
    return arguments


def _tune(arguments: argparse.Namespace) -> int:
    given = _check(arguments)
    tune = _tune_static if arguments.method in _STATIC else _tune_dynamic
    pair, prompts, entries = tune(arguments, given)
    _write(arguments, pair, len(prompts), entries[0])
    return 0


def _tune_dynamic(arguments: argparse.Namespace, given: list[TreeConfig]) -> _Tuned:
    trees = [
        dataclasses.replace(tree, calibration=arguments.calibration) for tree in given
    ]
    source = open_pair(
        arguments.target,
        arguments.draft,
        # Its calibration must serve them all.
        tree=TreeConfig(
            num_nodes=max(tree.num_nodes for tree in trees),
            depth=max(tree.depth for tree in trees),
            width=max(tree.width for tree in trees),
            calibration=arguments.calibration,
        ),
        dtype=arguments.dtype,
        method=arguments.method,
        rule="greedy" if arguments.temperature == 0 else "coupled",
        draft_vocabulary=arguments.draft_vocabulary,
    )
    assert isinstance(source.drafter, TreeDrafter), "these methods draft trees"
    for tree in trees:
        dataclasses.replace(
            source, drafter=dataclasses.replace(source.drafter, tree=tree)
        ).check_room(
            batch_size=arguments.batch_size, max_length=1 + arguments.max_new_tokens
        )
    pair, measured = _load(arguments, source)
    costs = contest.time_parts(measured, trees)
    recorded = contest.record_texts(measured, trees)
    ranking = predict(trees, recorded, costs, batch_size=arguments.batch_size)
    where = f"batch size {arguments.batch_size}, {jax.devices()[0].device_kind}"
    console = Console()
    console.print(_cost_table(f"costs, {where}", costs))

    chosen = finalists(ranking, arguments.finalists)
    entries = measured.run(chosen, "finalists")
    console.print(_result_table(f"finalists, {where}", entries))
    if arguments.sweep:
        swept = measured.run(ranking, "sweep")
        console.print(_result_table(f"sweep, {where}", swept))
        print(contest.distance(entries[0], swept))
    return pair, measured.prompts, entries


def _tune_static(arguments: argparse.Namespace, _: list[TreeConfig]) -> _Tuned:
    source = open_pair(
        arguments.target,
        arguments.draft,
        tree=TreeConfig(),
        dtype=arguments.dtype,
        method=arguments.method,
        draft_vocabulary=arguments.draft_vocabulary,
    )
    drafter = source.drafter
    assert isinstance(drafter, TreeDrafter)
    wide = static.widest_tree(static.deepest(drafter, arguments.max_depth))
    source = dataclasses.replace(
        source, drafter=dataclasses.replace(drafter, tree=wide)
    )
    source.check_room(
        batch_size=arguments.batch_size, max_length=1 + arguments.max_new_tokens
    )
    pair, measured = _load(arguments, source)
    rates = static.measure_rates(measured, wide)
    trees = static.static_trees(
        rates, max_nodes=arguments.max_nodes, count=arguments.finalists
    )
    entries = measured.run(trees, "finalists")
    where = f"batch size {arguments.batch_size}, {jax.devices()[0].device_kind}"
    Console().print(_result_table(f"static trees, {where}", entries))
    return pair, measured.prompts, entries


def _load(
    arguments: argparse.Namespace, source: PairSource
) -> tuple[LoadedPair, contest.Contest]:
    assert isinstance(source.drafter, TreeDrafter), "these methods draft trees"
    prompts = _choose_prompts(arguments, source)
    say(f"loading {arguments.target}")
    pair = source.load()
    return pair, contest.Contest(
        plain=_plain_runner(arguments, pair, prompts),
        drafter=source.drafter,
        prompts=prompts,
        repeats=arguments.repeats,
        progress=progress,
    )


def _check(arguments: argparse.Namespace) -> list[TreeConfig]:
    """Refuses flags that cannot be run, before long work starts; returns the grid."""
    check_writable(arguments.output)
    for name in ("num_prompts", "max_depth", "finalists", "repeats", "batch_size"):
        value = getattr(arguments, name)
        require(value >= 1, "--" + name.replace("_", "-"), value, "at least 1")
    for name in ("max_nodes", "max_new_tokens"):
        value = getattr(arguments, name)
        require(value >= 2, "--" + name.replace("_", "-"), value, "at least 2")
    # Settings that lie outside their range are refused here.
    join_settings(GenerateConfig, None, arguments)
    check_draft(arguments.method, arguments.draft)
    if arguments.target is None or arguments.draft is None:
        raise InputError(
            "give --target FOLDER with --draft FOLDER, or neither for the embedded pair"
        )
    if arguments.prompts is None:
        raise InputError("give --prompts FILE: what is tuned for depends on the text")
    is_static = arguments.method in _STATIC
    if is_static:
        depth = arguments.max_depth
        wanted = f"at most {static.MAX_DEPTH} for a static tree"
        require(depth <= static.MAX_DEPTH, "--max-depth", depth, wanted)
    for name in ("grid", "calibration"):
        if is_static and getattr(arguments, name) is not None:
            raise InputError(
                f"--{name} is for dynamic trees, and that of method {arguments.method} "
                "is static; leave it out"
            )
    if arguments.grid is not None:
        return parse_grid(arguments.grid)
    if arguments.sweep:
        raise InputError('--sweep runs all trees of a grid: give --grid "8/7/1 10/4/4"')
    return grid(arguments.max_nodes, arguments.max_depth)


def _choose_prompts(
    arguments: argparse.Namespace, source: PairSource
) -> list[list[int]]:
    """Returns the ids of prompts that fit, taken evenly from the whole file."""
    prompts = read_prompts(arguments.prompts)
    longest = source.config.max_positions - arguments.max_new_tokens
    if longest < 1:
        raise InputError(
            f"--max-new-tokens {arguments.max_new_tokens} leaves no room for a prompt; "
            f"the target has {source.config.max_positions} positions"
        )
    encoded = [text.encode(source.tokenizer, p, chat=arguments.chat) for p in prompts]
    fitting = [ids for ids in encoded if len(ids) <= longest]
    if len(fitting) < len(encoded):
        say(
            f"warning: {len(encoded) - len(fitting)} prompts of over {longest} tokens "
            "are left out"
        )
    if len(fitting) < arguments.batch_size:
        raise InputError(
            f"{arguments.prompts} has {len(fitting)} prompts of up to {longest} tokens "
            f"for --batch-size {arguments.batch_size}; give more prompts"
        )
    count = max(min(arguments.num_prompts, len(fitting)), arguments.batch_size)
    return [fitting[i * len(fitting) // count] for i in range(count)]


def _plain_runner(
    arguments: argparse.Namespace, pair: LoadedPair, prompts: list[list[int]]
) -> Runner:
    longest = max(map(len, prompts))
    return Runner(
        pair=pair,
        drafter=None,
        config=join_settings(GenerateConfig, None, arguments),
        max_length=longest + arguments.max_new_tokens,
        prompt_bucket=bucket_prompt(longest),
        batch_size=arguments.batch_size,
    )


def _result_table(title: str, measured: Sequence[contest.Entry]) -> Table:
    """Returns a table of trees beside plain decoding.

    Its "known" is the share of tokens at which the prediction guesses nothing.
    """
    table = Table(
        *("tree", "known", "predicted tokens/round", "speedup"),
        *("measured tokens/round", "speedup"),
        title=title,
    )
    for entry in measured:
        prediction = entry.prediction
        table.add_row(
            show(prediction.tree),
            "-" if math.isnan(prediction.certainty) else f"{prediction.certainty:.1%}",
            f"{prediction.tokens_per_round:.3f}",
            decimals(prediction.speedup),
            f"{entry.tokens_per_round:.3f}",
            f"{entry.speedup:.2f}",
        )
    table.add_row("plain decoding", "", "1.000", "1.00", "1.000", "1.00")
    return table


def _cost_table(title: str, costs: StepCosts) -> Table:
    """Returns a table of the costs of a round's parts."""
    table = Table("part", "by", "milliseconds", title=title)

    def add(part: str, by: str, values: dict[int, float]) -> None:
        shown = ", ".join(f"{key}: {1e3 * x:.2f}" for key, x in sorted(values.items()))
        table.add_row(part, by, shown)

    table.add_row("plain decoding", "", f"{1e3 * costs.token:.2f}")
    add("verification", "nodes", costs.verify)
    add("first level", "width", costs.read)
    add("each further level", "width", costs.step)
    table.add_row("rest of a round", "", f"{1e3 * costs.overhead:.2f}")
    return table


def _write(
    arguments: argparse.Namespace,
    pair: LoadedPair,
    num_prompts: int,
    best: contest.Entry,
) -> None:
    """Writes the settings file, and prints in one line what is in it."""
    device = jax.devices()[0].device_kind
    version = importlib.metadata.version("jax")
    comments = (
        f"eagle-jax tune on {device}, {pair.target.dtype}, jax {version}",
        f"target {arguments.target}, draft {arguments.draft}",
        f"{num_prompts} prompts of {arguments.prompts}, {arguments.max_new_tokens} "
        f"tokens each, temperature {arguments.temperature:g}",
    )
    tree = best.prediction.tree
    choices = arguments.output.with_suffix(".choices.json")
    if isinstance(tree, Topology) and best.speedup > 1:
        write_whole(choices, json.dumps(tree.paths) + "\n")
    settings = contest.settings_file(
        best,
        method=arguments.method,
        temperature=arguments.temperature,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        choices=str(choices),
        draft_vocabulary=arguments.draft_vocabulary,
        comments=comments,
    )
    write_whole(arguments.output, settings)
    found = show(tree)
    if best.speedup > 1:
        print(f"{found}: {best.speedup:.2f} times the speed of plain decoding")
    else:
        print(
            f"no tree pays here: {found}, the best, has {best.speedup:.2f} times the "
            'speed of plain decoding; use method = "autoregressive"'
        )
    print(f"wrote {arguments.output}, for eagle-jax generate --config")
