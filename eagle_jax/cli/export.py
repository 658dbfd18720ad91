"""Exports an EAGLE head in the format of the published ones.

    eagle-jax export --head pairs/mine/head --output my-head
    eagle-jax export --head FOLDER --target FOLDER --output my-head

Writes config.json, model.safetensors and, where torch is installed,
pytorch_model.bin, and reads them back. Folders may be Hugging Face hub names.
"""

import argparse
import dataclasses
import shutil
from pathlib import Path

import numpy as np

from eagle_jax.checkpoints import (
    check_pair,
    export_head,
    has_torch,
    head_config,
    is_export,
    open_weights,
    read_embedding,
    read_head,
    resolve,
    target_config,
)
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import expand_home
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart, check_new_folder
from eagle_jax.models.eagle_head import EagleHeadParams


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _export(_parse(argv)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Export an EAGLE-1/2 head in the layout of the published ones."
    )
    add = parser.add_argument
    add(
        "--head",
        required=True,
        help="the head: a folder or hub name, published or converted",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="the new folder")
    add("--target", help="its target: a folder or hub name, for the embedding table")
    add(
        "--embedding",
        choices=("include", "omit", "keep"),
        help="whether the files hold the embedding table, as the official ones do; "
        "keep does as the head's folder does; default include with --target, else keep",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights; auto keeps what the head has",
    )
    add("--overwrite", action="store_true", help="replace an earlier export")
    return parser.parse_args(argv)


def _export(arguments: argparse.Namespace) -> int:
    output = expand_home(arguments.output)
    folder = resolve(arguments.head)
    target = None if arguments.target is None else resolve(arguments.target)
    config = head_config(folder)
    open_weights(folder)
    check_apart(output, folder)
    if target is not None:
        check_pair(target_config(target), config)
        open_weights(target)
        check_apart(output, target)
    check_new_folder(output, overwrite=arguments.overwrite, is_ours=is_export)
    dtype = None if arguments.dtype == "auto" else arguments.dtype
    _, params = read_head(folder, dtype)
    params = _with_embedding(params, target, arguments.embedding)
    if not has_torch():
        say(
            "warning: torch is not installed: no pytorch_model.bin, which the official "
            "code looks for first"
        )
    say(f"exporting {arguments.head}")
    if config.layer.rope.kind not in ("default", "linear"):
        say(
            f"warning: the official code knows no {config.layer.rope.kind} rotary "
            "embeddings: there the head runs with plain ones, and less is accepted"
        )
    stored = str(params.fc.dtype)
    export_head(
        output,
        config,
        params,
        dtype=stored,
        also=lambda new: _copy_calibration(folder, new),
        overwrite=arguments.overwrite,
    )
    table = "without" if params.embedding is None else "with"
    files = ", ".join(sorted(path.name for path in output.iterdir()))
    print(
        f"wrote {output}: {files}; {stored}, {table} the embedding table, every weight "
        "read back bit for bit"
    )
    return 0


def _copy_calibration(head: Path, new: Path) -> None:
    if (head / CALIBRATION_FILE).is_file():
        shutil.copyfile(head / CALIBRATION_FILE, new / CALIBRATION_FILE)


def _with_embedding(
    params: EagleHeadParams, target: Path | None, choice: str | None
) -> EagleHeadParams:
    """Returns the head with or without a table, or refuses what changes the head."""
    choice = choice or ("keep" if target is None else "include")
    has_own = params.embedding is not None
    if choice == "keep" or (choice == "include") == has_own:
        return params
    if target is None:
        reason = (
            "which has the table"
            if choice == "include"
            else "whose table must equal the head's own, which would be lost"
        )
        raise InputError(
            f"--embedding {choice} needs --target FOLDER, the target of this head, "
            f"{reason}"
        )
    table = read_embedding(target, params.fc.dtype.name)
    if choice == "include":
        return dataclasses.replace(params, embedding=table)
    if not np.array_equal(np.asarray(params.embedding), np.asarray(table)):
        raise InputError(
            f"--embedding omit would change the head: its own embedding table is not "
            f"that of {target}"
        )
    return dataclasses.replace(params, embedding=None)
