"""Converts Hugging Face folders into one folder that loads quickly.

    eagle-jax convert --target FOLDER --draft FOLDER --output pairs/mine
    eagle-jax generate --target pairs/mine/target --draft pairs/mine/head

Weights go into Orbax folders. Folders may be Hugging Face hub names.
"""

import argparse
from pathlib import Path

from eagle_jax.checkpoints import convert_pair, resolve, target_config
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import expand_home
from eagle_jax.cli.settings import add_settings
from eagle_jax.config import DecodingConfig
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.heads import open_head


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _convert(_parse(argv)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Convert a target and its EAGLE head into a folder of this project."
    )
    add = parser.add_argument
    add("--target", required=True, help="a Hugging Face folder or hub name")
    add("--draft", help="its EAGLE head: a folder or hub name")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="gets target/ and head/; appears when everything is written",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights; auto keeps what each checkpoint has",
    )
    add_settings(parser, GenerateConfig, "quantization")
    add("--overwrite", action="store_true", help="replace an earlier conversion")
    return parser.parse_args(argv)


def _convert(arguments: argparse.Namespace) -> int:
    output = expand_home(arguments.output)
    target = resolve(arguments.target)
    head = None
    if arguments.draft is not None:
        head = open_head(resolve(arguments.draft), target_config(target))
    convert_pair(
        output,
        target,
        head,
        dtype=None if arguments.dtype == "auto" else arguments.dtype,
        bits=DecodingConfig(quantization=arguments.quantization or "none").bits,
        overwrite=arguments.overwrite,
        report=say,
    )
    halves = ["target"] if head is None else ["target", "head"]
    for half in halves:
        print(f"wrote {output / half}")
    return 0
