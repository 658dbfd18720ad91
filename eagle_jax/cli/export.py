"""Exports an EAGLE head, or heads of Medusa or Hydra, in the published format.

    eagle-jax export --head FOLDER --output my-head
    eagle-jax export --head FOLDER --target FOLDER --output my-head
    eagle-jax export --head my-eagle3-head --prefix layers.0 --output for-speculators
    eagle-jax export --checkpoint RUN/checkpoints/4000 --output my-head

Writes config.json, a safetensors file and, where torch is installed, the pickle that
the official code reads. Folders may be Hugging Face hub names.
"""

import argparse
import dataclasses
import tempfile
import typing
from pathlib import Path
from typing import Any

import jax

from eagle_jax.checkpoints import Export, has_torch, is_export, read_embedding, resolve
from eagle_jax.checkpoints.export_files import copy_beside
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.cli.command import Parser, command, say
from eagle_jax.config import Dtype
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart, check_new_folder
from eagle_jax.heads import OpenHead, export_head, open_head, open_whole
from eagle_jax.training.head import export_checkpoint


@command()
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    output, overwrite = arguments.output, arguments.overwrite
    source = arguments.checkpoint or resolve(arguments.head)
    check_apart(output, source)
    check_new_folder(output, overwrite=overwrite, is_ours=is_export)
    if arguments.checkpoint is None:
        _export(arguments, source)
        return
    with tempfile.TemporaryDirectory() as place:
        head = Path(place) / "head"
        export_checkpoint(arguments.checkpoint, head)
        _export(arguments, head)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    head = parser.add_mutually_exclusive_group(required=True)
    one = "the head: a folder or hub name; it or --checkpoint is required"
    head.add_argument("--head", metavar="FOLDER", help=one)
    other = "a checkpoint of eagle-jax train instead: RUN/checkpoints/STEP"
    head.add_argument("--checkpoint", type=Path, metavar="FOLDER", help=other)
    add("--output", required=True, type=Path, metavar="DIR", help="the new folder")
    add(
        "--target",
        help="its target: a folder or hub name, for the embedding table that published "
        "EAGLE-1/2 heads have and, with heads of Medusa or Hydra, for shared sizes",
    )
    add(
        "--prefix",
        choices=("midlayer", "layers.0"),
        help="of an EAGLE-3 head, what the names of its layer begin with; default "
        "midlayer",
    )
    kept = "of the weights; auto keeps what the head has"
    add("--dtype", choices=typing.get_args(Dtype), default="auto", help=kept)
    add("--overwrite", action="store_true", help="replace an earlier export")
    return parser.parse_args(argv)


def _export(arguments: argparse.Namespace, folder: Path) -> None:
    output: Path = arguments.output
    given = arguments.checkpoint or arguments.head
    target = None if arguments.target is None else resolve(arguments.target)
    head = open_head(folder, None if target is None else open_whole(target)[0])
    layouts = head.head.tensor_names()
    if arguments.prefix is not None and arguments.prefix not in layouts:
        raise InputError(f"--prefix is for an EAGLE-3 head, and {given} holds another")
    if target is not None:
        check_apart(output, target)
    params = head.load(None, None if arguments.dtype == "auto" else arguments.dtype)
    params = _with_embedding(params, head, target)
    if not has_torch():
        name = head.head.files[1]
        say(
            f"warning: torch is not installed: no {name}, which the official code reads"
        )
    say(f"exporting {given}")
    layer = getattr(head.head.config, "layer", None)
    if layer is not None and layer.rope.kind not in ("default", "linear"):
        say(
            f"warning: the official code knows no {layer.rope.kind} rotary embeddings: "
            "there the head runs with plain ones, and less is accepted"
        )
    stored = str(jax.tree.leaves(params)[0].dtype)
    base = Fields.read(folder).get("base_model_name_or_path", arguments.target)
    how = Export(
        dtype=stored,
        base_model=base,
        also=copy_beside(folder),
        overwrite=arguments.overwrite,
    )
    export_head(output, head.head, params, how, arguments.prefix)
    files = ", ".join(sorted(path.name for path in output.iterdir()))
    print(f"wrote {output}: {files}; weights in {stored}")


def _with_embedding(params: Any, head: OpenHead, target: Path | None) -> Any:
    """Returns the head, with the target's table where published folders hold one."""
    wants_table = getattr(head.head.Settings, "include_embedding", False)
    if target is None or not wants_table or params.embedding is not None:
        return params
    table = read_embedding(target, params.fc.dtype.name)
    return dataclasses.replace(params, embedding=table)
