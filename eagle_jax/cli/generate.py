"""Generates the target's own text by EAGLE-2, from the command line.

    eagle-jax generate --prompt "def main():"
    eagle-jax generate --target FOLDER --draft FOLDER --prompt "Hello"

Without a target the embedded pair writes Python. Folders may be Hugging Face hub names.
Texts and the summary go to standard output, everything else to standard error.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax

from eagle_jax import assets
from eagle_jax.cli import page, results
from eagle_jax.cli.command import EXIT_INTERRUPTED, Parser, command, say
from eagle_jax.cli.comparison import compare
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.pair_flags import (
    add_flags,
    add_pair_flags,
    choose_embedded,
    open_named,
)
from eagle_jax.cli.processes import add_mesh_flags, has_processes, join, mesh_shape
from eagle_jax.cli.request_flags import add_request_flags, read_requests, take_request
from eagle_jax.cli.session import Session
from eagle_jax.cli.settings import PAIR_GROUPS, add_groups, join_settings
from eagle_jax.engine import Engine, PairConfig, Request
from eagle_jax.engine.calls import empty_engine_for
from eagle_jax.engine.config import AutoTree
from eagle_jax.errors import InputError
from eagle_jax.evaluation.records import versions
from eagle_jax.files import write_json, write_whole
from eagle_jax.models.quantized import num_bytes

_EMBEDDED_PROMPT, _DEFAULT_PROMPT = "def main():", "Once upon a time"
_BRANCHING = {"num_nodes": 26, "depth": 6, "width": 4}


@command(unwritable="cannot write the results: {error}")
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parse(argv)
    _join_processes(arguments)
    given = take_request(arguments)
    config = join_settings(arguments.config, arguments)
    _check(arguments, config)
    pair = open_named(arguments, config, mesh_shape(arguments))
    shared, prompts, texts = read_requests(arguments, pair, given)
    if pair.draft is not None:
        say(f"{arguments.draft} holds {pair.draft.description}")
    if arguments.target == str(assets.TARGET):
        say(
            "the embedded pair: a small model that was trained on Python's library "
            "and writes plausible, not working, Python"
        )
    say(f"loading {arguments.target}")
    if len({text.request.grammar for text in texts}) > 1:
        raise InputError(
            "the prompts' settings hold several constraints; give one `regex` or "
            "`json_schema` per command"
        )
    for text in texts:
        text.is_watched = arguments.stream
        text.keeps_rounds = arguments.trace or _draws(arguments)
    engine = empty_engine_for(pair, texts, config.batch_size)
    say("compiling")
    session = Session(
        engine=engine,
        prompts=prompts,
        texts=texts,
        show_tree=arguments.show_tree,
        is_chat=arguments.chat,
    )
    session.warm_up()
    say(f"compiled in {session.compile_seconds:.1f} s")
    unshown: OSError | None = None
    try:
        finished = session.decode_all()
    except OSError as error:  # The reader may have stopped; results come first.
        finished, unshown = False, error
    sums = session.totals()
    if arguments.compare and finished:
        is_sampled = any(text.request.temperature > 0 for text in texts)
        is_other = is_sampled and config.acceptance == "rejection"
        compared = compare(session, pair.with_drafter(None), is_other=is_other)
        finished, sums = compared is not None, sums | (compared or {})

    heat = max(text.request.temperature for text in texts)
    shared = dataclasses.replace(shared, temperature=heat)
    decoded = {"runs": session.runs, "totals": sums}
    _write(arguments, _conditions(arguments, engine, shared) | decoded, pair.tokenizer)
    if unshown is not None:
        raise unshown
    print(results.summary(sums))
    if reason := results.explain_speedup(sums):
        say(reason)
    if finished:
        return 0
    say("interrupted")
    return EXIT_INTERRUPTED


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    group = add_pair_flags(parser)
    default = "default configs/embedded.toml for the embedded pair"
    toml = f"settings from a TOML file; flags win; {default}"
    add_flags(group, "config", help=toml)
    group.add_argument(
        "--prompt",
        action="append",
        help=f"may be given several times; default {_EMBEDDED_PROMPT!r} for the "
        f"embedded pair, {_DEFAULT_PROMPT!r} otherwise",
    )
    add = parser.add_argument_group("what is shown").add_argument
    add("--stream", action="store_true", help="show the text as it is decided")
    add(
        "--compare",
        action="store_true",
        help="also decode autoregressively, short texts in turns",
    )
    add("--show-tree", action="store_true", help="draw the last round's tree")
    add("--json", type=Path, metavar="FILE", help="write the results")
    add("--trace", action="store_true", help="with --json: add every round's tree")
    add("--html", type=Path, metavar="FILE", help="write a page of texts and trees")
    add("--svg", type=Path, metavar="FILE", help="draw the round that brought most")
    add_request_flags(parser)
    memory = "memory and arithmetic"
    groups = PAIR_GROUPS | {memory: f"batch_size {PAIR_GROUPS[memory]}"}
    add_groups(parser, PairConfig, groups)
    add_mesh_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.target is None and arguments.draft is None:
        _choose_tree(arguments)
    is_embedded = choose_embedded(arguments)
    default = _EMBEDDED_PROMPT if is_embedded else _DEFAULT_PROMPT
    arguments.prompt = arguments.prompt or ([] if arguments.prompts else [default])
    return arguments


def _choose_tree(arguments: argparse.Namespace) -> None:
    """Chooses a tree that branches for the embedded pair, if trees are drawn."""
    chosen = [getattr(arguments, name) for name in ("config", "method", *_BRANCHING)]
    if _draws(arguments) and all(one is None for one in chosen):
        vars(arguments).update(_BRANCHING)
        sizes = ", ".join(f"{name} {value}" for name, value in _BRANCHING.items())
        say(f"drawing trees of {sizes}, as this pair's usual ones do not branch")


def _join_processes(arguments: argparse.Namespace) -> None:
    """Joins this process with the others, and silences all but the first."""
    looks = arguments.stream, arguments.trace, _draws(arguments)
    if has_processes(arguments) and any(looks):
        raise InputError(
            "--stream, --trace, --show-tree, --html and --svg look at every round, "
            "which several processes cannot; leave them out"
        )
    if not join(arguments):
        arguments.json = None


def _check(arguments: argparse.Namespace, config: PairConfig) -> None:
    """Refuses flags that do not go together, before any long work starts."""
    for file in filter(None, (arguments.json, arguments.html, arguments.svg)):
        check_writable(file)
    if _draws(arguments) and config.method_row.is_plain:
        raise InputError("autoregressive decoding drafts no tree that could be drawn")
    if arguments.trace and arguments.json is None:
        raise InputError("--trace needs --json FILE, where the trees are written")
    if arguments.stream and config.batch_size > 1:
        raise InputError(
            f"--stream shows one text at a time, but batch_size = "
            f"{config.batch_size}; leave out one of them"
        )


def _draws(arguments: argparse.Namespace) -> bool:
    """Returns whether trees are drawn."""
    return arguments.show_tree or bool(arguments.html or arguments.svg)


def _write(
    arguments: argparse.Namespace, record: dict[str, Any], tokenizer: Any
) -> None:
    """Writes the files that were asked for."""
    if arguments.json is not None:
        write_json(arguments.json, record)
    if arguments.html is not None:
        write_whole(arguments.html, page.page(record, tokenizer))
    if arguments.svg is not None:
        write_whole(arguments.svg, page.picture(record, tokenizer))


def _conditions(
    arguments: argparse.Namespace, engine: Engine, shared: Request
) -> dict[str, Any]:
    """Returns the settings and versions that the results of a run depend on."""
    pair, request = dataclasses.asdict(engine.pair.config), dataclasses.asdict(shared)
    pair |= {"dtype": engine.pair.dtype, "max_length": engine.max_length}
    own = dataclasses.asdict(engine.pair.config.own)
    own["is_auto"] = isinstance(engine.pair.config.tree, AutoTree)
    del pair["request"], pair["tree"]
    names = {"target": arguments.target, "draft": arguments.draft}
    schema, names = arguments.schema_file, names | {"chat": arguments.chat}
    names |= {"regex": shared.regex, "json_schema": schema and str(schema)}
    shape = mesh_shape(arguments)
    names |= {"mesh": None if shape is None else str(shape)}
    return {
        "settings": names | {"tree": own, "pair": pair, "request": request},
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "target_bytes": num_bytes(engine.pair.params.target),
    }
