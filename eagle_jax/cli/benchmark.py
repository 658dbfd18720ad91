"""Times a round on this machine, beside the model calls that it needs.

    eagle-jax benchmark
    eagle-jax benchmark --random Llama-2-7B --dtype bfloat16
    eagle-jax benchmark --target FOLDER --draft FOLDER
    eagle-jax benchmark --methods eagle2 medusa hydra recycling
    eagle-jax benchmark --suite gpu --random Llama-3-8B | tee gpu.jsonl

All figures of one run are taken in turn, so ratios hold where times do not.
"""

import argparse
import json

import jax
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from eagle_jax.benchmarks.models import MODELS
from eagle_jax.benchmarks.random_pairs import open_random
from eagle_jax.benchmarks.rounds import FIGURES, time_rounds
from eagle_jax.benchmarks.suite import CASES, run_suite
from eagle_jax.cli.command import Parser, command, say
from eagle_jax.cli.pair_flags import add_flags
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings
from eagle_jax.config import TreeConfig, require_counts
from eagle_jax.decoding.requests import make_requests, round_up_slots
from eagle_jax.engine import Pair, PairConfig
from eagle_jax.engine.calls import check_memory
from eagle_jax.engine.ladder import num_nodes
from eagle_jax.engine.open import open_pair, with_target
from eagle_jax.errors import InputError
from eagle_jax.methods import METHODS, PLAIN, SMALL_MODEL
from eagle_jax.models.devices import on_cpu

_CAPTION = (
    "milliseconds, medians; bare calls: the draft model's, then the target's over the "
    "nodes; overhead: round / bare calls"
)
_COUNTS = {
    "depth": (6, "drafted levels"),
    "width": (10, "nodes expanded per level"),
    "slots": (512, "cache slots per row, or what it takes"),
    "prompt_length": (64, "tokens in the cache at first"),
    "batch_size": (1, "rows"),
    "iterations": (24, "model calls per measurement"),
    "repeats": (15, "measurements per figure"),
}


@command()
def main(argv: list[str] | None = None) -> None:
    """Prints what a round of every method costs over its bare model calls."""
    arguments = _parse(argv)
    require_counts(arguments, num_nodes=2, **dict.fromkeys(_COUNTS, 1))
    if arguments.suite:
        _run_suite(arguments)
        return
    if arguments.draft is not None and arguments.target is None:
        raise InputError("give --target with --draft, or --random alone")
    if arguments.target is not None:
        methods = [METHODS[name] for name in arguments.methods]
        for method in [one for one in methods if one.weights] or methods:
            method.check_draft(arguments.draft)
    sources = {method: _open(arguments, method) for method in arguments.methods}
    depth = max(getattr(source.drafter, "depth", 0) for source in sources.values())
    needed = round_up_slots(arguments.prompt_length + arguments.iterations + 1, depth)
    slots = max(arguments.slots, needed)
    for source in sources.values():
        check_memory(source, batch_size=arguments.batch_size, max_length=slots)
    pairs: dict[str, Pair] = {}
    for name, source in sources.items():
        for loaded in list(pairs.values())[:1]:
            source = with_target(source, loaded.params.target)
        pairs[name] = source.load()
    vocab_size = sources[arguments.methods[0]].vocab_size
    prompt = np.random.default_rng(0).integers(vocab_size, size=arguments.prompt_length)
    requests = make_requests(
        [prompt.tolist()] * arguments.batch_size,
        max_new_tokens=arguments.iterations + 1,
        prompt_bucket=arguments.prompt_length,
    )
    say("compiling")
    with progress("measuring", arguments.repeats, pause=0) as report:
        costs = time_rounds(
            pairs,
            requests,
            num_slots=slots,
            iterations=arguments.iterations,
            repeats=arguments.repeats,
            report=report,
        )
    tree = f"{arguments.num_nodes}/{arguments.depth}/{arguments.width}"
    what = arguments.target or arguments.random
    title = f"{what}, tree {tree}, {slots} slots, {jax.devices()[0].device_kind}"
    first = Column("method", min_width=max(map(len, costs)))
    table = Table(first, "nodes", *FIGURES, title=title, caption=_CAPTION)
    for name, cost in costs.items():
        nodes = num_nodes(pairs[name].drafter) if name in pairs else 1
        table.add_row(name, str(nodes), *(f"{time:.2f}" for time in cost.values()))
    Console().print(table)


def _run_suite(arguments: argparse.Namespace) -> None:
    if arguments.target is not None:
        raise InputError("--suite times random weights: give --random, not --target")
    # A CPU has neither time nor memory for many rows and long caches.
    cases = [case for case in CASES if case.rows * case.slots < 2**14 or not on_cpu()]
    sizes, iterations = MODELS[arguments.random], arguments.iterations
    dtype = arguments.dtype
    for result in run_suite(sizes, cases, iterations=iterations, dtype=dtype):
        print(json.dumps(result), flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    pair = parser.add_mutually_exclusive_group()
    add_flags(pair, "target", help="a Hugging Face folder or hub name")
    add_flags(parser, "draft")
    random = "random weights of these sizes"
    pair.add_argument("--random", choices=MODELS, default="50m", help=random)
    suite = "time what is known of no GPU, a line of JSON each, instead of a table"
    add("--suite", choices=["gpu"], help=suite)
    add("--num-nodes", type=int, default=60, help="nodes of the tree, root included")
    for name, (count, what) in _COUNTS.items():
        add(f"--{name.replace('_', '-')}", type=int, default=count, help=what)
    add_settings(parser, PairConfig, "dtype", usual={"dtype": "auto"})
    methods = [name for name in METHODS if name != PLAIN.name]
    rounds = "time a round of each of these, beside a token of plain decoding"
    usual = [PairConfig.method]
    add("--methods", nargs="+", choices=methods, default=usual, help=rounds)
    return parser.parse_args(argv)


def _open(arguments: argparse.Namespace, method: str) -> Pair:
    sizes = {name: getattr(arguments, name) for name in ("num_nodes", "depth", "width")}
    config = PairConfig(dtype=arguments.dtype, tree=TreeConfig(**sizes))
    config = config.with_method(method)
    if arguments.target is None:
        if config.method_row.weights is SMALL_MODEL:
            raise InputError(
                "--random makes heads, no small model; give --target FOLDER and "
                "--draft FOLDER"
            )
        return open_random(MODELS[arguments.random], config)
    return open_pair(arguments.target, arguments.draft, config)
