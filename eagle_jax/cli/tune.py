"""Finds the tree that pays on this machine, for a pair and a batch size.

    eagle-jax tune
    eagle-jax tune --target FOLDER --draft FOLDER --prompts FILE --batch-size 4
    eagle-jax tune --sweep --grid "3/2/1 8/7/1 10/4/4"
    eagle-jax tune --method medusa --target FOLDER --draft FOLDER --prompts FILE
    eagle-jax tune --method lookup --target FOLDER --prompts FILE

It times the parts of a round, records once what the draft proposes and the target
writes, ranks a grid of trees by both, and runs the best few for real beside plain
decoding. For methods whose tree is static it measures how often drafts of each depth
and rank are right, and runs the best trees of a few sizes. Of chain, lookup, lookahead
and eagle2+lookup it runs a few settings, without a prediction. Without a target it
tunes the embedded pair. The file that it writes is for `eagle-jax generate --config`.
"""

import argparse
import dataclasses
import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from eagle_jax.cli.command import run_command, say
from eagle_jax.cli.files import read_prompts
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import join_settings
from eagle_jax.cli.tune_flags import FINALISTS, STATIC, check, parse
from eagle_jax.cli.tune_tables import cost_table, result_table
from eagle_jax.config import GenerateConfig, TreeConfig
from eagle_jax.decoding.requests import bucket_length
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import RecyclingDrafter, TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.files import write_whole
from eagle_jax.generation import text
from eagle_jax.generation.drafts import make_drafter
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.generation.room import check_depth
from eagle_jax.generation.runner import Runner
from eagle_jax.interface import Drafter
from eagle_jax.tree import Topology
from eagle_jax.tuning import contest, static, tried
from eagle_jax.tuning.prediction import Prediction, finalists, predict, show, sizes

_Tuned = tuple[LoadedPair, list[list[int]], list[contest.Entry]]
"""A pair, its prompts, and the trees that were run, the quickest first."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(
        lambda: _tune(parse(argv)), unwritable="cannot write the settings: {error}"
    )


def _tune(arguments: argparse.Namespace) -> int:
    given = check(arguments)
    if arguments.method in tried.METHODS:
        pair, prompts, entries = _tune_tried(arguments, given)
    elif arguments.method in STATIC:
        pair, prompts, entries = _tune_static(arguments)
    else:
        pair, prompts, entries = _tune_dynamic(arguments, given)
    _write(arguments, pair, len(prompts), entries[0])
    return 0


def _tune_tried(arguments: argparse.Namespace, trees: list[TreeConfig]) -> _Tuned:
    method, rule = arguments.method, _rule(arguments)
    source = open_pair(
        arguments.target,
        arguments.draft,
        tree=trees[0],
        dtype=arguments.dtype,
        method=method,
        rule=rule,
        draft_vocabulary=arguments.draft_vocabulary,
    )

    def drafter_of(tree: TreeConfig) -> Drafter:
        size = source.config.vocab_size
        drafter = make_drafter(method, source.draft, tree, rule, vocab_size=size)
        assert drafter is not None, "plain decoding has no settings"
        return drafter

    if arguments.grid is None:
        trees = tried.fitting(
            trees,
            drafter_of,
            max_nodes=arguments.max_nodes,
            max_depth=arguments.max_depth,
        )
    for tree in trees:
        check_depth(tree, source.config)
        _check_room(arguments, source, drafter_of(tree))
    pair, measured = _load(arguments, source, drafter_of)
    entries = measured.run([Prediction(tree=tree) for tree in trees], "settings")
    title = f"{method}, {'/'.join(sizes(method))}"
    Console().print(_results(title, arguments, entries))
    return pair, measured.prompts, entries


def _tune_dynamic(arguments: argparse.Namespace, trees: list[TreeConfig]) -> _Tuned:
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
        rule=_rule(arguments),
        draft_vocabulary=arguments.draft_vocabulary,
    )
    drafter_of = _with_tree(source)
    for tree in trees:
        _check_room(arguments, source, drafter_of(tree))
    pair, measured = _load(arguments, source, drafter_of)
    costs = contest.time_parts(measured, trees)
    recorded = contest.record_texts(measured, trees)
    ranking = predict(trees, recorded, costs, batch_size=arguments.batch_size)
    console = Console()
    console.print(cost_table(f"costs, {_where(arguments)}", costs))
    chosen = finalists(ranking, arguments.finalists or FINALISTS)
    entries = measured.run(chosen, "finalists")
    console.print(_results("finalists", arguments, entries))
    if arguments.sweep:
        swept = measured.run(ranking, "sweep")
        console.print(_results("sweep", arguments, swept))
        print(contest.distance(entries[0], swept))
    return pair, measured.prompts, entries


def _tune_static(arguments: argparse.Namespace) -> _Tuned:
    source = open_pair(
        arguments.target,
        arguments.draft,
        tree=TreeConfig(),
        dtype=arguments.dtype,
        method=arguments.method,
        draft_vocabulary=arguments.draft_vocabulary,
    )
    assert source.drafter is not None, "these methods draft"
    wide = static.recorded_tree(source.drafter, arguments.max_depth or static.MAX_DEPTH)
    drafter_of = _with_tree(source)
    _check_room(arguments, source, drafter_of(wide))
    pair, measured = _load(arguments, source, drafter_of)
    rates = static.measure_rates(measured, wide)
    trees = static.static_trees(
        rates,
        max_nodes=arguments.max_nodes,
        count=arguments.finalists or FINALISTS,
    )
    entries = measured.run(trees, "finalists")
    Console().print(_results("static trees", arguments, entries))
    return pair, measured.prompts, entries


def _rule(arguments: argparse.Namespace) -> AcceptanceRule:
    return "greedy" if arguments.temperature == 0 else "coupled"


def _where(arguments: argparse.Namespace) -> str:
    return f"batch size {arguments.batch_size}, {jax.devices()[0].device_kind}"


def _results(
    title: str, arguments: argparse.Namespace, entries: list[contest.Entry]
) -> Table:
    return result_table(f"{title}, {_where(arguments)}", arguments.method, entries)


def _with_tree(source: PairSource) -> Callable[[TreeConfig | Topology], Drafter]:
    """Returns the function from a tree to the pair's drafter with that tree."""
    drafter = source.drafter
    assert isinstance(drafter, TreeDrafter | RecyclingDrafter), "these draft trees"
    return lambda tree: dataclasses.replace(drafter, tree=tree)


def _check_room(
    arguments: argparse.Namespace, source: PairSource, drafter: Drafter
) -> None:
    dataclasses.replace(source, drafter=drafter).check_room(
        batch_size=arguments.batch_size, max_length=1 + arguments.max_new_tokens
    )


def _load(
    arguments: argparse.Namespace,
    source: PairSource,
    drafter_of: Callable[[Any], Drafter],
) -> tuple[LoadedPair, contest.Contest]:
    prompts = _choose_prompts(arguments, source)
    say(f"loading {arguments.target}")
    pair = source.load()
    return pair, contest.Contest(
        plain=_plain_runner(arguments, pair, prompts),
        drafter_of=drafter_of,
        prompts=prompts,
        repeats=arguments.repeats,
        progress=progress,
    )


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
        prompt_bucket=bucket_length(longest),
        batch_size=arguments.batch_size,
    )


def _write(
    arguments: argparse.Namespace,
    pair: LoadedPair,
    num_prompts: int,
    best: contest.Entry,
) -> None:
    """Writes the settings file, and prints in one line what is in it."""
    version, device = importlib.metadata.version("jax"), jax.devices()[0].device_kind
    comments = (
        f"eagle-jax tune, {device}, texts in {pair.target.dtype}, jax {version}",
        f"target {arguments.target}"
        + (f", draft {arguments.draft}" if arguments.draft else ""),
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
        choices=str(choices.resolve()),
        draft_vocabulary=arguments.draft_vocabulary,
        comments=comments,
    )
    write_whole(arguments.output, settings)
    found = show(tree, arguments.method)
    if best.speedup > 1:
        print(f"{found}: {best.speedup:.2f} times the speed of plain decoding")
    else:
        print(
            f"no tree pays here: {found}, the best, has {best.speedup:.2f} times the "
            'speed of plain decoding; use method = "autoregressive"'
        )
    print(f"wrote {arguments.output}, for eagle-jax generate --config")
