"""The cost of a round on this machine, beside the model calls that it needs.

    eagle-jax benchmark
    eagle-jax benchmark --random llama2-7b --dtype bfloat16
    eagle-jax benchmark --target FOLDER --draft FOLDER
    eagle-jax benchmark --methods eagle2 medusa hydra recycling
    eagle-jax benchmark --training

All figures of one run are taken in turn, so ratios hold where times do not.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from eagle_jax.benchmarks.rounds import (
    FIGURES,
    RoundCost,
    arbitrary_requests,
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
from eagle_jax.config import DecodingConfig, TreeConfig
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import round_up_slots
from eagle_jax.errors import InputError
from eagle_jax.evaluation.records import versions
from eagle_jax.files import write_json
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.memory import check_training
from eagle_jax.generation.pairs import PairSource, open_pair
from eagle_jax.generation.random_pairs import open_random
from eagle_jax.interface import Params
from eagle_jax.methods import METHODS, PLAIN
from eagle_jax.models.transformer import TransformerParams

_CAPTION = (
    "milliseconds, medians; bare: the target's call over the nodes and the draft "
    "model's calls, alone; overhead: round / (bare verify + bare drafts)"
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _benchmark(_parse(argv)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Time rounds beside their bare model calls.")
    add = parser.add_argument
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--target", help="a Hugging Face folder or hub name")
    add("--draft", help="its EAGLE head, or what else the methods draft with")
    pair.add_argument(
        "--random", metavar="SIZES", help="random weights; default 50m, or sizes"
    )
    add("--num-nodes", type=int, default=60, help="nodes of the tree, root included")
    add("--depth", type=int, default=6, help="drafted levels")
    add("--width", type=int, default=10, help="nodes expanded per level")
    add("--slots", type=int, default=512, help="cache slots per row, or what it takes")
    add("--prompt-length", type=int, default=64, help="tokens in the cache at first")
    add("--batch-size", type=int, default=1)
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--iterations", type=int, default=24, help="model calls per measurement")
    add("--repeats", type=int, default=15, help="measurements per figure")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--methods",
        nargs="+",
        choices=[name for name in METHODS if name != PLAIN.name],
        default=[DecodingConfig.method],
        metavar="METHOD",
        help="time a round of each of these, beside a token of plain decoding",
    )
    what.add_argument(
        "--training", action="store_true", help="time training steps instead"
    )
    add("--row-length", type=int, default=256, help="with --training: tokens per row")
    add("--json", type=Path, metavar="FILE", help="write every figure")
    return parser.parse_args(argv)


def _benchmark(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        check_writable(arguments.json)
    counts = ("iterations", "repeats", "batch_size", "prompt_length", "row_length")
    for name in counts:
        if getattr(arguments, name) < 1:
            raise InputError(f"{name} = {getattr(arguments, name)} must be at least 1")
    if arguments.draft is not None and arguments.training:
        raise InputError("--training times new heads of each kind; leave out --draft")
    if arguments.draft is not None and arguments.target is None:
        raise InputError("give --target with --draft, or --random alone")
    return (_training if arguments.training else _rounds)(arguments)


def _open(arguments: argparse.Namespace, method: str) -> PairSource:
    tree = TreeConfig(
        num_nodes=arguments.num_nodes, depth=arguments.depth, width=arguments.width
    )
    if tree.levels < 1:
        raise InputError("the benchmark drafts: give num_nodes >= 2 and depth >= 1")
    decoding = DecodingConfig(dtype=arguments.dtype)
    config = GenerateConfig(tree=tree, decoding=decoding).with_method(method)
    if arguments.target is None:
        sizes = arguments.random or "50m"
        return open_random(sizes, config, with_tokenizer=False)
    return open_pair(arguments.target, arguments.draft, config)


def _rounds(arguments: argparse.Namespace) -> int:
    """Prints what a round of every method costs over its bare model calls."""
    if arguments.target is not None:
        methods = [METHODS[name] for name in arguments.methods]
        for method in [one for one in methods if one.weights] or methods:
            method.check_draft(arguments.draft)
    sources = {method: _open(arguments, method) for method in arguments.methods}
    depth = max(getattr(source.drafter, "depth", 0) for source in sources.values())
    needed = round_up_slots(arguments.prompt_length + arguments.iterations + 1, depth)
    slots = max(arguments.slots, needed)
    for source in sources.values():
        source.check_memory(
            batch_size=arguments.batch_size, max_length=slots, grows=False
        )
    methods = _load(sources)
    requests = arbitrary_requests(
        sources[arguments.methods[0]].config.vocab_size,
        batch=arguments.batch_size,
        prompt_length=arguments.prompt_length,
        new_tokens=arguments.iterations + 1,
    )
    say("compiling")
    with progress("measuring", arguments.repeats, pause=0) as report:
        costs = time_rounds(
            methods,
            requests,
            num_slots=slots,
            iterations=arguments.iterations,
            repeats=arguments.repeats,
            report=report,
        )
    Console().print(_table(costs, slots, arguments))
    _write(
        arguments,
        methods={name: dataclasses.asdict(cost) for name, cost in costs.items()},
    )
    return 0


def _load(sources: dict[str, PairSource]) -> dict[str, tuple[Decoder, Params]]:
    """Returns greedy decoders with their weights; the target's are loaded once."""
    found: dict[str, tuple[Decoder, Params]] = {}
    shared: list[TransformerParams] = []
    for method, source in sources.items():
        if shared:
            source = dataclasses.replace(source, read_target=lambda _: shared[0])
        pair = source.load()
        shared.append(pair.params.target)
        decoder = Decoder(target=pair.target, drafter=pair.drafter, acceptance="greedy")
        found[method] = decoder, pair.params
    return found


def _training(arguments: argparse.Namespace) -> int:
    """Prints how fast heads are trained, and the target's share of a step."""
    sizes = {"batch_size": arguments.batch_size, "row_length": arguments.row_length}
    source = _open(arguments, PLAIN.name)
    check_training(source.config, source.dtype, **sizes)
    configs = {  # Of all kinds first: a target may be too shallow for one.
        kind: training_step(
            kind, source.config, source.dtype, row_length=arguments.row_length
        )
        for kind in TRAININGS
    }
    target_params, every = source.load().params.target, {}
    columns = ("kind", *TIMED, "forward's share of a step")
    table = Table(*columns, title="training, medians of tokens per second")
    for kind, config in configs.items():
        say(f"timing {kind}")
        speeds = time_training(
            config, target_params, **sizes, repeats=arguments.repeats
        )
        every[kind] = speeds
        share = np.median(np.array(speeds["step"]) / np.array(speeds["forward"]))
        shown = (f"{np.median(values):,.0f}" for values in speeds.values())
        table.add_row(kind, *shown, f"{share:.0%}")
    Console().print(table)
    _write(arguments, tokens_per_second=every)
    return 0


def _table(
    costs: dict[str, RoundCost], slots: int, arguments: argparse.Namespace
) -> Table:
    tree = f"{arguments.num_nodes}/{arguments.depth}/{arguments.width}"
    what = arguments.target or arguments.random or "50m"
    device = jax.devices()[0].device_kind
    title = f"{what}, tree {tree}, {slots} slots, {device}"
    method = Column("method", min_width=max(map(len, costs)))
    table = Table(method, "nodes", *FIGURES, title=title, caption=_CAPTION)
    for name, cost in costs.items():
        shown = (f"{cost.figures[figure].median:.2f}" for figure in FIGURES)
        table.add_row(name, str(cost.num_nodes), *shown)
    return table


def _write(arguments: argparse.Namespace, **results: Any) -> None:
    """Writes results with what they depend on, if a file is given."""
    if arguments.json is None:
        return
    common = {
        "settings": vars(arguments) | {"json": str(arguments.json)},
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
    }
    write_json(arguments.json, common | results)
