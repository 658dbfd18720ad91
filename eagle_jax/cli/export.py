"""Exports an EAGLE head, or heads of Medusa or Hydra, in the published format.

    eagle-jax export --head pairs/mine/head --output my-head
    eagle-jax export --head FOLDER --target FOLDER --output my-head
    eagle-jax export --head my-eagle3-head --prefix layers.0 --output for-speculators

Writes config.json, a safetensors file and, where torch is installed, the pickle that
the official code reads, and reads them back. Folders may be Hugging Face hub names.
"""

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from eagle_jax.checkpoints import (
    check_pair,
    eagle3_config,
    export_eagle3,
    export_head,
    export_hydra,
    export_medusa,
    has_torch,
    head_config,
    heads_of,
    is_eagle3,
    is_export,
    open_weights,
    read_eagle3_head,
    read_embedding,
    read_head,
    resolve,
    target_config,
)
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.checkpoints.names import EAGLE3_HEADS
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import expand_home
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart, check_new_folder
from eagle_jax.generation.heads import open_heads
from eagle_jax.methods import HYDRA, MEDUSA


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _export(_parse(argv)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Export an EAGLE head, or heads of Medusa or Hydra, in the "
        "layout of the published ones."
    )
    add = parser.add_argument
    add(
        "--head",
        required=True,
        help="the head: a folder or hub name, published or converted",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="the new folder")
    add(
        "--target",
        help="its target: a folder or hub name, for the embedding table and, "
        "with heads of Medusa or Hydra, for the sizes that they share",
    )
    add(
        "--embedding",
        choices=("include", "omit", "keep"),
        help="whether the files hold the embedding table, as the official ones do; "
        "keep does as the head's folder does; default include with --target and an "
        "EAGLE-1/2 head, else keep",
    )
    add(
        "--prefix",
        choices=tuple(EAGLE3_HEADS),
        help="of an EAGLE-3 head, what the names of its layer begin with; default "
        "midlayer",
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
    if heads_of(folder) is not None:
        return _export_heads(folder, target, output, arguments)
    is_third = is_eagle3(folder)
    if not is_third and arguments.prefix is not None:
        raise InputError(f"--prefix is for an EAGLE-3 head, and {folder} holds another")
    config = eagle3_config(folder) if is_third else head_config(folder)
    open_weights(folder)
    check_apart(output, folder)
    if target is not None:
        check_pair(target_config(target), config)
        open_weights(target)
        check_apart(output, target)
    check_new_folder(output, overwrite=arguments.overwrite, is_ours=is_export)
    dtype = None if arguments.dtype == "auto" else arguments.dtype
    params: Any = (read_eagle3_head if is_third else read_head)(folder, dtype)[1]
    # Published EAGLE-3 heads have no table: the official code takes the target's.
    choice = arguments.embedding or (
        "keep" if target is None or is_third else "include"
    )
    params = _with_embedding(params, target, choice)
    _warn_without_torch("pytorch_model.bin, which the official code looks for first")
    say(f"exporting {arguments.head}")
    if config.layer.rope.kind not in ("default", "linear"):
        say(
            f"warning: the official code knows no {config.layer.rope.kind} rotary "
            "embeddings: there the head runs with plain ones, and less is accepted"
        )
    stored = str(params.fc.dtype)
    own: Any = {"prefix": arguments.prefix or "midlayer"} if is_third else {}
    export: Any = export_eagle3 if is_third else export_head
    export(
        output,
        config,
        params,
        **own,
        dtype=stored,
        also=lambda new: _copy_calibration(folder, new),
        overwrite=arguments.overwrite,
    )
    table = "without" if params.embedding is None else "with"
    _say_written(output, f"{stored}, {table} the embedding table")
    return 0


def _export_heads(
    folder: Path, target: Path | None, output: Path, arguments: argparse.Namespace
) -> int:
    """Exports heads of Medusa or Hydra; returns the exit code."""
    kind = heads_of(folder)
    assert kind is not None
    if arguments.prefix is not None:
        raise InputError(f"--prefix is for an EAGLE-3 head, and {folder} holds another")
    if arguments.embedding is not None:
        raise InputError(
            f"--embedding is for an EAGLE head: {folder} holds {kind.capitalize()} "
            "heads, whose files have no embedding table"
        )
    if target is None:
        raise InputError(
            f"{folder} holds {kind.capitalize()} heads, which need --target FOLDER, "
            "their target: its sizes say what the files leave open"
        )
    sizes = target_config(target)
    _, load = open_heads(
        folder, sizes, "float32", MEDUSA if kind == MEDUSA.kind else HYDRA
    )
    check_apart(output, folder)
    check_apart(output, target)
    check_new_folder(output, overwrite=arguments.overwrite, is_ours=is_export)
    dtype = None if arguments.dtype == "auto" else arguments.dtype
    config, params = load(folder, sizes, None, dtype)
    _warn_without_torch(f"{kind}_lm_head.pt, which the official code reads")
    say(f"exporting {arguments.head}")
    stored = str(jax.tree.leaves(params)[0].dtype)
    export: Any = export_medusa if kind == "medusa" else export_hydra
    export(
        output,
        config,
        params,
        base_model=Fields.read(folder).get("base_model_name_or_path", arguments.target),
        dtype=stored,
        overwrite=arguments.overwrite,
    )
    _say_written(output, f"{config.num_heads} heads in {stored}")
    return 0


def _warn_without_torch(what: str) -> None:
    if not has_torch():
        say(f"warning: torch is not installed: no {what}")


def _say_written(output: Path, what: str) -> None:
    files = ", ".join(sorted(path.name for path in output.iterdir()))
    print(f"wrote {output}: {files}; {what}, every weight read back bit for bit")


def _copy_calibration(head: Path, new: Path) -> None:
    if (head / CALIBRATION_FILE).is_file():
        shutil.copyfile(head / CALIBRATION_FILE, new / CALIBRATION_FILE)


def _with_embedding(
    params: Any, target: Path | None, choice: Literal["include", "omit", "keep"]
) -> Any:
    """Returns the head with or without a table, or refuses what changes the head."""
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
