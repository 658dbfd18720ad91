"""Converted pairs: settings as they were, weights in an Orbax folder.

    DIR/target/  config.json, the tokenizer's files, params/ (Orbax), store.json
    DIR/head/    config.json, params/, store.json

The Orbax tree is flat: tensors by the names they have in a Hugging Face folder. A
quantized matrix is kept as its integers, `NAME.values`, and `NAME.scales`.
`store.json` is written last and lists what belongs to the store, so whatever was cut
short is seen before anything is read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.eagle3 import (
    eagle3_config,
    eagle3_tensors,
    load_eagle3_head,
)
from eagle_jax.checkpoints.heads import check_pair, load_head
from eagle_jax.checkpoints.hf_config import head_config, is_eagle3
from eagle_jax.checkpoints.hub import ABOUT_DRAFTS, STORE_LIST, TEXT_FILES
from eagle_jax.checkpoints.load import load_target, open_target, target_bits
from eagle_jax.checkpoints.tensors import check_space, saving
from eagle_jax.checkpoints.weights import (
    STORE_FORMAT,
    STORE_PARAMS,
    STORE_VERSION,
    StoreFiles,
    common_dtype,
    describe,
    open_weights,
    quiet,
)
from eagle_jax.files import check_apart, new_folder
from eagle_jax.models.quantized import bits_of
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.parsing import read_json, read_json_if_any

_TARGET, _HEAD = "target", "head"
# Slices of a large tensor can be read alone, and none outgrows a compressor.
_CHUNK_BYTES = 256 * 2**20
# About the size of the largest file that Orbax makes.
_FILE_BYTES = 2**31


def convert_pair(
    output: Path,
    target: Path,
    head: Path | None = None,
    *,
    dtype: str | None = None,
    bits: int | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes `target/` and `head/`, which are loaded like the folders they came from.

    A head's own embedding table is left out where it equals the target's.

    Args:
        output: The folder to write.
        target: The target's folder, from `resolve`.
        head: The folder of an EAGLE head, from `resolve`; `None` for the target alone.
        dtype: The dtype of the stored weights; `None` for that of each checkpoint.
        bits: 8 or 4 to quantize the target, see `load_target`.
        overwrite: Whether to replace an earlier conversion.
        report: A function that is called with a line when the checks are done and the
            work begins.

    Raises:
        InputError: If the pair cannot be used, a weight does not fit into `dtype`, or
            `output` cannot be written.
    """
    config, files = open_target(target)
    target_bits(files, config, bits)
    check_apart(output, target)
    if head is not None:
        read_config = eagle3_config if is_eagle3(head) else head_config
        check_pair(config, read_config(head))
        open_weights(head)
        check_apart(output, head)
    with new_folder(output, overwrite=overwrite, is_ours=is_pair) as unfinished:
        report(f"converting {target}")
        _, params = load_target(target, dtype, bits=bits)
        (unfinished / _TARGET).mkdir()
        tensors = names.by_name(params, names.TRANSFORMER)
        bits = bits_of(params)
        write_store(unfinished / _TARGET, target, tensors, bits=bits, with_text=True)
        if head is not None:
            tensors = _head_tensors(head, config, params, dtype)
            (unfinished / _HEAD).mkdir()
            write_store(unfinished / _HEAD, head, tensors, with_text=False)


def is_pair(folder: Path) -> bool:
    """Returns whether a folder holds a converted pair and nothing else."""
    return all(
        path.is_dir() and path.name in (_TARGET, _HEAD) and is_store(path)
        for path in folder.iterdir()
    )


def write_store(
    folder: Path,
    source: Path,
    tensors: dict[str, Any],
    *,
    bits: int | None = None,
    with_text: bool,
) -> None:
    """Writes one half of a converted pair, and reads it back.

    Args:
        folder: The folder to fill, which is empty.
        source: The folder of the checkpoint whose settings are kept.
        tensors: The weights by name, and the maps of an EAGLE-3 head.
        bits: The bits of quantized matrices; `None` if there are none.
        with_text: Whether to copy the tokenizer's files and the generation settings
            too.

    Raises:
        InputError: If what is read back differs.
        OSError: If something cannot be written.
    """
    import orbax.checkpoint as ocp

    path = folder / STORE_PARAMS
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    check_space(folder, num_bytes, min(num_bytes, _FILE_BYTES))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tensors}
    with quiet(), saving(path), ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.args.PyTreeSave(
            tensors,
            save_args=save_args,
            ocdbt_target_data_file_size=_FILE_BYTES,
        )
        checkpointer.save(path.resolve(), args=arguments)
    described = {name: describe(tensors[name]) for name in sorted(tensors)}
    if with_text:
        _copy_text(source, folder)
    for name in ABOUT_DRAFTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    settings = read_json(source / "config.json")
    given = "dtype" if "dtype" in settings else "torch_dtype"
    dtype = str(common_dtype({name: described[name]["dtype"] for name in described}))
    _write_json(folder / "config.json", settings | {given: dtype})
    listed = {
        "format": STORE_FORMAT,
        "version": STORE_VERSION,
        "bits": bits,
        "tensors": described,
        "files": _sizes(folder),
    }
    _write_json(folder / STORE_LIST, listed)
    written = StoreFiles(folder)
    for name in tensors:
        written.read(name)


def is_store(folder: Path) -> bool:
    """Returns whether a folder holds one half of a converted pair and nothing else."""
    listed = read_json_if_any(folder / STORE_LIST) or {}
    files = listed.get("files")
    if listed.get("format") != STORE_FORMAT or not isinstance(files, dict):
        return False
    return _sizes(folder).keys() <= files.keys() | {STORE_LIST}


def _head_tensors(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str | None,
) -> dict[str, Any]:
    """Loads an EAGLE head of either kind, as it is stored."""
    given = (folder, target, target_params, dtype)
    if is_eagle3(folder):
        return eagle3_tensors(*load_eagle3_head(*given))
    return names.by_name(load_head(*given)[1], names.EAGLE_HEAD)


def _copy_text(source: Path, folder: Path) -> None:
    """Copies the tokenizer's files, the chat template and the generation settings."""
    for pattern in TEXT_FILES:
        for path in sorted(source.glob(pattern)):
            is_replaced = path.name in ("config.json", STORE_LIST)
            if path.is_file() and not (is_replaced or path.match("*.index.json")):
                shutil.copyfile(path, folder / path.name)


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of each file below a folder, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
