"""The tree that pays on this machine, for a pair and a batch size.

    python scripts/tune.py
    python scripts/tune.py --target FOLDER --draft FOLDER --prompts FILE --batch-size 4
    python scripts/tune.py --sweep --grid "3/2/1 8/7/1 10/4/4"

Times the parts of a round, records once what the draft proposes and the target writes,
ranks a grid of trees by both, and runs the best few for real beside plain decoding.
Without a target it tunes the embedded pair. What it writes is for
`scripts/generate.py --config`.
"""

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Imports take a while; until `run_script` nothing is to be undone.
    signal.signal(
        signal.SIGINT, lambda *_: os._exit(os.write(2, b"interrupted\n") and 130)
    )

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from eagle_jax import assets
from eagle_jax.cli import tune, tune_report
from eagle_jax.cli.command import (
    Parser,
    keep_compiled_programs,
    run_command,
    run_script,
    say,
)
from eagle_jax.cli.files import check_writable, read_prompts
from eagle_jax.config import (
    DecodingConfig,
    GenerateConfig,
    SamplingConfig,
    TreeConfig,
    require,
)
from eagle_jax.decoding.requests import bucket_prompt
from eagle_jax.drafting import TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.evaluation import tuning
from eagle_jax.files import write_whole
from eagle_jax.generation import text
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.generation.runner import Runner

_EMBEDDED_PROMPTS = Path(assets.__file__).parent / "prompts.json"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(
        lambda: _tune(_parse(argv)), unwritable="cannot write the settings: {error}"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Find the tree that pays.")
    add = parser.add_argument
    add("--target", help="a Hugging Face folder or hub name; default the embedded pair")
    add("--draft", help="its EAGLE head, or a smaller model")
    add("--method", choices=("eagle2", "small-model"), default="eagle2")
    add("--prompts", type=Path, help=".txt (a line each), .json list or .jsonl")
    add("--chat", action="store_true", help="wrap prompts in the chat template")
    add(
        "--calibration",
        metavar="FILE",
        help="of scripts/calibrate.py; default the head's own, none for none",
    )
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
    if arguments.target is None and arguments.draft is None:
        arguments.target = str(assets.TARGET)
        is_small = arguments.method == "small-model"
        arguments.draft = str(assets.SMALL if is_small else assets.HEAD)
        arguments.prompts = arguments.prompts or _EMBEDDED_PROMPTS
    return arguments


def _tune(arguments: argparse.Namespace) -> int:
    trees = [
        dataclasses.replace(tree, calibration=arguments.calibration)
        for tree in _check(arguments)
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
    )
    assert isinstance(source.drafter, TreeDrafter), "these methods draft trees"
    for tree in trees:
        dataclasses.replace(
            source, drafter=dataclasses.replace(source.drafter, tree=tree)
        ).check_room(
            batch_size=arguments.batch_size, max_length=1 + arguments.max_new_tokens
        )
    prompts = _choose_prompts(arguments, source)
    say(f"loading {arguments.target}")
    pair = source.load()
    contest = tune.Contest(
        plain=_plain_runner(arguments, pair, prompts),
        drafter=source.drafter,
        prompts=prompts,
        repeats=arguments.repeats,
    )
    costs = tune.time_parts(contest, trees)
    recorded = tune.record_texts(contest, trees)
    ranking = tuning.predict(trees, recorded, costs, batch_size=arguments.batch_size)
    where = f"batch size {arguments.batch_size}, {jax.devices()[0].device_kind}"
    console = Console()
    console.print(tune_report.cost_table(f"costs, {where}", costs))

    chosen = tuning.finalists(ranking, arguments.finalists)
    entries = _run(contest, chosen, "finalists")
    console.print(tune_report.result_table(f"finalists, {where}", entries))
    if arguments.sweep:
        swept = _run(contest, ranking, "sweep")
        console.print(tune_report.result_table(f"sweep, {where}", swept))
        print(tune_report.distance(entries[0], swept))
    _write(arguments, pair, len(prompts), entries[0])
    return 0


def _run(
    contest: tune.Contest, ranking: Sequence[tuning.Prediction], label: str
) -> list[tune_report.Entry]:
    """Runs trees for real, as many at a time as stay compiled; the quickest first."""
    found: list[tune_report.Entry] = []
    for start in range(0, len(ranking), tune.MOST_TREES):
        group = ranking[start : start + tune.MOST_TREES]
        plain, timings = contest.measure([entry.tree for entry in group], label)
        found += tune_report.entries(group, plain, timings)
    return sorted(found, key=lambda entry: -entry.speedup)


def _check(arguments: argparse.Namespace) -> list[TreeConfig]:
    """Refuses what cannot be run, before any long work starts; returns the grid."""
    check_writable(arguments.output)
    for name in ("num_prompts", "max_depth", "finalists", "repeats", "batch_size"):
        value = getattr(arguments, name)
        require(value >= 1, "--" + name.replace("_", "-"), value, "at least 1")
    for name in ("max_nodes", "max_new_tokens"):
        value = getattr(arguments, name)
        require(value >= 2, "--" + name.replace("_", "-"), value, "at least 2")
    _config(arguments)  # Refuses what lies outside its range.
    if arguments.target is None or arguments.draft is None:
        raise InputError(
            "give --target FOLDER with --draft FOLDER, or neither for the embedded pair"
        )
    if arguments.prompts is None:
        raise InputError("give --prompts FILE: what is tuned for depends on the text")
    if arguments.grid is not None:
        return tuning.parse_grid(arguments.grid)
    if arguments.sweep:
        raise InputError('--sweep runs all trees of a grid: give --grid "8/7/1 10/4/4"')
    return tuning.grid(arguments.max_nodes, arguments.max_depth)


def _choose_prompts(
    arguments: argparse.Namespace, source: PairSource
) -> list[list[int]]:
    """Returns the ids of prompts that fit, evenly spread over the file."""
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
        config=_config(arguments),
        max_length=longest + arguments.max_new_tokens,
        prompt_bucket=bucket_prompt(longest),
        batch_size=arguments.batch_size,
    )


def _config(arguments: argparse.Namespace) -> GenerateConfig:
    return GenerateConfig(
        sampling=SamplingConfig(temperature=arguments.temperature),
        decoding=DecodingConfig(
            max_new_tokens=arguments.max_new_tokens, batch_size=arguments.batch_size
        ),
    )


def _write(
    arguments: argparse.Namespace,
    pair: LoadedPair,
    num_prompts: int,
    best: tune_report.Entry,
) -> None:
    """Writes the settings file and says in one line what is in it."""
    device = jax.devices()[0].device_kind
    version = importlib.metadata.version("jax")
    comments = (
        f"scripts/tune.py on {device}, {pair.target.dtype}, jax {version}",
        f"target {arguments.target}, draft {arguments.draft}",
        f"{num_prompts} prompts of {arguments.prompts}, {arguments.max_new_tokens} "
        f"tokens each, temperature {arguments.temperature:g}",
    )
    settings = tune_report.settings_file(
        best,
        method=arguments.method,
        temperature=arguments.temperature,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        comments=comments,
    )
    write_whole(arguments.output, settings)
    found = tuning.show(best.prediction.tree)
    if best.speedup > 1:
        print(f"{found}: {best.speedup:.2f} times the speed of plain decoding")
    else:
        print(
            f"no tree pays here: {found}, the best, has {best.speedup:.2f} times the "
            'speed of plain decoding; use method = "autoregressive"'
        )
    print(f"wrote {arguments.output}, for scripts/generate.py --config")


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main)
