"""The flags of `eagle-jax tune`, and what they say is to be run."""

import argparse
import dataclasses
from pathlib import Path

from eagle_jax import assets
from eagle_jax.cli.command import Parser
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.config import GenerateConfig, TreeConfig, require
from eagle_jax.errors import InputError
from eagle_jax.files import is_special
from eagle_jax.generation.methods import DRAFTS, SETTINGS, check_draft
from eagle_jax.tuning import static, tried
from eagle_jax.tuning.prediction import grid, parse_grid

_EMBEDDED_PROMPTS = Path(assets.__file__).parent / "prompts.json"
STATIC = ("eagle1", "medusa", "hydra", "recycling")
"""The methods whose trees are static."""

_MAX_NODES = 64

FINALISTS = 5
"""The trees run for real where no flag says how many."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the flags, completed where the embedded pair is tuned."""
    parser = Parser(description="Find the tree that pays.")
    add = parser.add_argument
    add("--target", help="a Hugging Face folder or hub name; default the embedded pair")
    add("--draft", help="its EAGLE head, Medusa or Hydra heads, or a smaller model")
    add(
        "--method",
        choices=[name for name in SETTINGS if name != "autoregressive"],
        default="eagle2",
        help="the tree of eagle1, medusa, hydra and recycling is static: its paths go "
        "into a JSON file beside the settings",
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
    add("--max-nodes", type=int, help="largest tree, root included; default 64")
    add("--max-depth", type=int, help="deepest tree; default 8, or any")
    add("--grid", metavar="TREES", help='only these, such as "8/7/1 60/6/10"')
    add("--sweep", action="store_true", help="with --grid: run all of them for real")
    add("--finalists", type=int, help=f"trees run for real; default {FINALISTS}")
    add("--repeats", type=int, default=5, help="measurements of each")
    add("--output", type=Path, default=Path("tuned.toml"), metavar="FILE")
    arguments = parser.parse_args(argv)
    has_embedded = arguments.method not in ("medusa", "hydra")
    if has_embedded and arguments.target is None and arguments.draft is None:
        arguments.target = str(assets.TARGET)
        if arguments.method in DRAFTS:
            is_small = arguments.method == "small-model"
            arguments.draft = str(assets.SMALL if is_small else assets.HEAD)
        arguments.prompts = arguments.prompts or _EMBEDDED_PROMPTS
    return arguments


def check(arguments: argparse.Namespace) -> list[TreeConfig]:
    """Refuses flags that cannot be run, before long work; returns what may be run."""
    check_writable(arguments.output)
    for name in ("num_prompts", "max_depth", "finalists", "repeats", "batch_size"):
        value = getattr(arguments, name)
        holds = value is None or value >= 1
        require(holds, "--" + name.replace("_", "-"), value, "at least 1")
    if arguments.grid is not None and (arguments.max_nodes or arguments.max_depth):
        raise InputError(
            "--max-nodes and --max-depth choose trees, and --grid names them; leave "
            "out one or the other"
        )
    if arguments.max_nodes is None:
        arguments.max_nodes = _MAX_NODES
    for name in ("max_nodes", "max_new_tokens"):
        value = getattr(arguments, name)
        require(value >= 2, "--" + name.replace("_", "-"), value, "at least 2")
    # Settings that lie outside their range are refused here.
    join_settings(GenerateConfig, None, arguments)
    method = arguments.method
    check_draft(method, arguments.draft)
    if arguments.target is None:
        raise InputError(
            "give --target FOLDER with --draft FOLDER, or neither for the embedded pair"
        )
    if arguments.prompts is None:
        raise InputError("give --prompts FILE: what is tuned for depends on the text")
    max_depth = arguments.max_depth or static.MAX_DEPTH
    if method in STATIC:
        if is_special(arguments.output):
            raise InputError(
                f"`output` {arguments.output} is no file, and the tree of {method} is "
                "written beside it; give a file name"
            )
        wanted = f"at most {static.MAX_DEPTH} for a static tree"
        require(max_depth <= static.MAX_DEPTH, "--max-depth", max_depth, wanted)
    for setting in ("num_nodes", "calibration", "draft_vocabulary"):
        name = "grid" if setting == "num_nodes" else setting
        if getattr(arguments, name) is not None and setting not in SETTINGS[method]:
            readers = ", ".join(one for one in SETTINGS if setting in SETTINGS[one])
            raise InputError(
                f"--{name.replace('_', '-')} is for methods that read {setting}: "
                f"{readers}; leave it out for {method}"
            )
    is_tried = method in tried.METHODS
    if is_tried and (arguments.sweep or arguments.finalists is not None):
        raise InputError(
            "--sweep and --finalists choose from predictions, and all settings of "
            f"{method} are run for real; leave them out"
        )
    given = None if arguments.grid is None else parse_grid(arguments.grid)
    if given is None and arguments.sweep:
        raise InputError('--sweep runs all trees of a grid: give --grid "8/7/1 10/4/4"')
    if is_tried:
        trees = tried.settings(method, given)
    else:
        trees = given or grid(arguments.max_nodes, max_depth)
    calibration = arguments.calibration
    return [dataclasses.replace(tree, calibration=calibration) for tree in trees]
