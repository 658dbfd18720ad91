"""The cost of a round on this machine, beside the model calls that it needs.

    eagle-jax benchmark
    eagle-jax benchmark --random llama2-7b --dtype bfloat16
    eagle-jax benchmark --target FOLDER --draft FOLDER
    eagle-jax benchmark --methods eagle2 medusa hydra recycling
    eagle-jax benchmark --training
    eagle-jax benchmark --contexts 512 4096 16384

All figures of one run are taken in turn, so ratios hold where times do not.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import get_args

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from eagle_jax.benchmarks.contexts import time_contexts
from eagle_jax.benchmarks.methods import FIGURES, time_methods
from eagle_jax.benchmarks.rounds import (
    Pair,
    Spread,
    arbitrary_requests,
    time_compilation,
    time_rounds,
)
from eagle_jax.benchmarks.training import (
    TIMED,
    TRAININGS,
    time_training,
    training_step,
)
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.progress import progress
from eagle_jax.config import Method, TreeConfig
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import round_up_slots
from eagle_jax.drafting import Eagle3Head, EagleHead, TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.evaluation.records import versions
from eagle_jax.files import write_json
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.generation.random_pairs import open_random
from eagle_jax.generation.room import check_training
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer

_MEANINGS = {
    "token": "autoregressive decoding, one token",
    "round": "speculative decoding, one round",
    "draft": "of a round: the tree",
    "verify": "of a round: the target over the tree",
    "accept + commit": "of a round: walk, text and caches",
    "bare verify": "the target's forward and unembed over N rows, alone",
    "bare drafts": "the head's D calls and unembeds, alone",
    "overhead": "round / (bare verify + bare drafts)",
    "round / token": "what a round must be accepted for to pay",
}
_NOT_TIMED = ("small-model", "autoregressive")
_RATIOS = ("overhead", "round / token")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _benchmark(_parse(argv)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Time rounds and their parts.")
    add = parser.add_argument
    add("--target", help="a Hugging Face folder or hub name")
    add("--draft", help="its EAGLE head")
    add("--random", metavar="SIZES", help="random weights; default 50m, or sizes")
    add("--num-nodes", type=int, default=60, help="nodes of the tree, root included")
    add("--depth", type=int, default=6, help="drafted levels")
    add("--width", type=int, default=10, help="nodes expanded per level")
    add("--slots", type=int, default=512, help="cache slots per row")
    add("--prompt-length", type=int, default=64, help="tokens in the cache at first")
    add("--batch-size", type=int, default=1)
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--iterations", type=int, default=24, help="model calls per measurement")
    add("--repeats", type=int, default=15, help="measurements per figure")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--methods",
        nargs="+",
        choices=[name for name in get_args(Method) if name not in _NOT_TIMED],
        metavar="METHOD",
        help="time a round of each of these instead, with random weights",
    )
    instead.add_argument(
        "--training",
        action="store_true",
        help="time training steps instead, of every kind but hydra-mlp",
    )
    instead.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="time rounds in texts of these lengths instead",
    )
    add("--row-length", type=int, default=256, help="with --training: tokens per row")
    add("--skip-compilation", action="store_true", help="do not time compilation")
    add("--json", type=Path, metavar="FILE", help="write every figure")
    return parser.parse_args(argv)


def _tree_config(arguments: argparse.Namespace) -> TreeConfig:
    return TreeConfig(
        num_nodes=arguments.num_nodes, depth=arguments.depth, width=arguments.width
    )


def _head(pair: LoadedPair) -> EagleHead | Eagle3Head:
    drafter = pair.drafter
    assert isinstance(drafter, TreeDrafter), "a benchmark's pair drafts trees"
    assert isinstance(drafter.model, EagleHead | Eagle3Head), "with a head"
    return drafter.model


def _open(arguments: argparse.Namespace) -> PairSource:
    tree = _tree_config(arguments)
    if tree.levels < 1:
        raise InputError("the benchmark drafts: give num_nodes >= 2 and depth >= 1")
    if arguments.training and arguments.draft is not None:
        raise InputError("--training times new heads of each kind; leave out --draft")
    if arguments.target is None and arguments.draft is None:
        sizes = arguments.random or "50m"
        return open_random(
            sizes, tree=tree, dtype=arguments.dtype, with_tokenizer=False
        )
    is_whole = arguments.training or arguments.draft is not None
    if arguments.random is not None or arguments.target is None or not is_whole:
        raise InputError(
            "give --target with --draft (without it for --training), or --random alone"
        )
    return open_pair(
        arguments.target, arguments.draft, tree=tree, dtype=arguments.dtype
    )


def _benchmark(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        check_writable(arguments.json)
    counts = ("iterations", "repeats", "batch_size", "prompt_length", "row_length")
    for name in counts:
        if getattr(arguments, name) < 1:
            raise InputError(f"{name} = {getattr(arguments, name)} must be at least 1")
    if arguments.contexts:
        return _benchmark_contexts(arguments)
    needed = arguments.prompt_length + arguments.iterations + arguments.depth + 2
    if arguments.slots < needed:
        raise InputError(
            f"slots = {arguments.slots} must be at least {needed}: prompt, iterations "
            "and one round"
        )
    if arguments.methods:
        return _benchmark_methods(arguments)
    source = _open(arguments)
    if arguments.training:
        check_training(
            source.config,
            source.dtype,
            batch_size=arguments.batch_size,
            row_length=arguments.row_length,
        )
        return _benchmark_training(arguments, source.load())
    source.check_room(
        batch_size=arguments.batch_size, max_length=arguments.slots, grows=False
    )
    loaded = source.load()
    pair = Pair(
        target=loaded.target,
        model=_head(loaded),
        tree=_tree_config(arguments),
        params=loaded.params,
        batch=arguments.batch_size,
        num_slots=arguments.slots,
        prompt_length=arguments.prompt_length,
    )
    say("compiling")
    with progress("measuring", arguments.repeats, pause=0) as report:
        figures = time_rounds(
            pair,
            iterations=arguments.iterations,
            repeats=arguments.repeats,
            report=report,
        )
    seconds = {} if arguments.skip_compilation else time_compilation(pair)
    Console().print(_table(figures, seconds, arguments))
    if arguments.json is not None:
        result = {
            "settings": vars(arguments) | {"json": str(arguments.json)},
            "versions": versions(),
            "device": jax.devices()[0].device_kind,
            "overhead": figures["overhead"].median,
            "figures": {
                name: dataclasses.asdict(spread) for name, spread in figures.items()
            },
            "compile_seconds": seconds,
        }
        write_json(arguments.json, result)
    return 0


def _benchmark_methods(arguments: argparse.Namespace) -> int:
    """Prints what a round of every method costs over its bare model calls."""
    if arguments.target is not None or arguments.draft is not None:
        raise InputError(
            "--methods times random weights, since each method has heads of its own; "
            "leave out --target and --draft, or give --random SIZES in their place"
        )
    sources = {
        method: open_random(
            arguments.random or "50m",
            tree=_tree_config(arguments),
            dtype=arguments.dtype,
            with_tokenizer=False,
            method=method,
        )
        for method in arguments.methods
    }
    depth = max(getattr(source.drafter, "depth", 0) for source in sources.values())
    slots = round_up_slots(arguments.prompt_length + arguments.iterations + 1, depth)
    slots = max(arguments.slots, slots)
    for source in sources.values():
        source.check_room(
            batch_size=arguments.batch_size, max_length=slots, grows=False
        )
    methods, source = {}, next(iter(sources.values()))
    target_params = source.load().params.target
    for method, source in sources.items():
        decoder = Decoder(
            target=Transformer(config=source.config, dtype=source.dtype),
            drafter=source.drafter,
            acceptance="greedy",
        )
        draft = () if source.draft is None else source.draft.load(target_params)
        methods[method] = decoder, Params(target=target_params, drafter=draft)
    requests = arbitrary_requests(
        source.config.vocab_size,
        batch=arguments.batch_size,
        prompt_length=arguments.prompt_length,
        new_tokens=arguments.iterations + 1,
    )
    say("compiling")
    with progress("measuring", arguments.repeats, pause=0) as report:
        figures = time_methods(
            methods,
            requests,
            num_slots=slots,
            iterations=arguments.iterations,
            repeats=arguments.repeats,
            report=report,
        )
    table = Table("method", "nodes", *FIGURES, title="milliseconds, medians")
    for method, found in figures.items():
        nodes = getattr(methods[method][0].drafter, "num_nodes", 1)
        shown = (f"{found[name].median:.2f}" for name in FIGURES)
        table.add_row(method, str(nodes), *shown)
    Console().print(table)
    if arguments.json is not None:
        settings = vars(arguments) | {"json": str(arguments.json)}
        result = {
            method: {name: dataclasses.asdict(spread) for name, spread in found.items()}
            for method, found in figures.items()
        }
        write_json(arguments.json, {"settings": settings, "methods": result})
    return 0


def _benchmark_training(arguments: argparse.Namespace, loaded: LoadedPair) -> int:
    """Prints how fast heads are trained, and the target's share of a step."""
    target, every = loaded.target, {}
    sizes = {"batch_size": arguments.batch_size, "row_length": arguments.row_length}
    columns = ("kind", *TIMED, "forward's share of a step")
    table = Table(*columns, title="training, medians of tokens per second")
    configs = {  # Of all kinds first: a target may be too shallow for one.
        kind: training_step(
            kind, target.config, target.dtype, row_length=arguments.row_length
        )
        for kind in TRAININGS
    }
    for kind, config in configs.items():
        say(f"timing {kind}")
        speeds = time_training(
            config, loaded.params.target, **sizes, repeats=arguments.repeats
        )
        every[kind] = speeds
        share = np.median(np.array(speeds["step"]) / np.array(speeds["forward"]))
        shown = (f"{np.median(values):,.0f}" for values in speeds.values())
        table.add_row(kind, *shown, f"{share:.0%}")
    Console().print(table)
    if arguments.json is not None:
        settings = vars(arguments) | {"json": str(arguments.json)}
        write_json(arguments.json, {"settings": settings, "tokens_per_second": every})
    return 0


def _benchmark_contexts(arguments: argparse.Namespace) -> int:
    """Prints the cost of rounds in short and in long texts."""
    if arguments.batch_size != 1:
        raise InputError(
            f"--contexts times one text at a time, but batch_size = "
            f"{arguments.batch_size}; leave out one of them"
        )
    tokens_added = arguments.iterations + arguments.depth + 1
    shortest = (arguments.repeats + 1) * tokens_added + 1
    if min(arguments.contexts) < shortest:
        raise InputError(
            f"--contexts {min(arguments.contexts)} must be at least {shortest}: the "
            "measurements themselves add tokens; lower --repeats or --iterations"
        )
    source = _open(arguments)
    longest = max(arguments.contexts)
    source.check_room(batch_size=1, max_length=longest, grows=False)
    loaded = source.load()
    costs = time_contexts(
        loaded.target,
        _head(loaded),
        _tree_config(arguments),
        loaded.params,
        sorted(arguments.contexts),
        iterations=arguments.iterations,
        repeats=arguments.repeats,
        report=say,
    )
    columns = ("tokens", "slots", "prefill s", "round ms", "attention ms", "rest ms")
    table = Table(*columns, title=f"batch 1, {jax.devices()[0].device_kind}")
    for cost in costs:
        times = (cost.prefill, cost.round, cost.round - cost.rest, cost.rest)
        shown = (f"{x:.2f}" for x in times)
        table.add_row(f"{cost.length:,}", f"{cost.slots:,}", *shown)
    Console().print(table)
    if arguments.json is not None:
        settings = vars(arguments) | {"json": str(arguments.json)}
        rows = [dataclasses.asdict(cost) for cost in costs]
        write_json(arguments.json, {"settings": settings, "contexts": rows})
    return 0


def _table(
    figures: dict[str, Spread], seconds: dict[str, float], arguments: argparse.Namespace
) -> Table:
    tree = f"{arguments.num_nodes}/{arguments.depth}/{arguments.width}"
    what = arguments.target or arguments.random or "50m"
    device = jax.devices()[0].device_kind
    table = Table(
        "figure",
        "median",
        "low",
        "high",
        "meaning",
        title=f"{what}, tree {tree}, {arguments.slots} slots, {device}",
    )
    for name, meaning in _MEANINGS.items():
        spread, unit = figures[name], "" if name in _RATIOS else " ms"
        values = (spread.median, spread.low, spread.high)
        table.add_row(name, *(f"{value:.2f}{unit}" for value in values), meaning)
    for name, value in seconds.items():
        table.add_row(f"compile, {name}", f"{value:.1f} s", "", "", "prefill and loop")
    return table
