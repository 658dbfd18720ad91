"""Converted pairs: settings as they were, weights in an Orbax folder.

    DIR/target/  config.json, the tokenizer's files, params/ (Orbax), store.json
    DIR/head/    config.json, params/, store.json

The Orbax tree is flat: tensors by the names they have in a Hugging Face folder. A
quantized matrix is kept as its integers, `NAME.values`, and `NAME.scales`.
`store.json` holds their bits and lists the tensors' dtypes: Orbax would open each
tensor to tell them.
"""

import shutil
from collections.abc import Callable, Sequence
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
    STORE_PARAMS,
    common_dtype,
    open_weights,
    quiet,
)
from eagle_jax.files import check_apart, new_folder, write_json
from eagle_jax.models.quantized import bits_of
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.parsing import read_json

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
        write_store(
            unfinished / _TARGET, target, tensors, bits=bits, text_files=TEXT_FILES
        )
        if head is not None:
            tensors = _head_tensors(head, config, params, dtype)
            (unfinished / _HEAD).mkdir()
            write_store(unfinished / _HEAD, head, tensors)


def is_pair(folder: Path) -> bool:
    """Returns whether a folder holds a converted pair and nothing else."""
    halves = list(folder.iterdir())
    return all(
        half.name in (_TARGET, _HEAD) and (half / STORE_PARAMS).is_dir()
        for half in halves
    ) and all(
        path.name == STORE_PARAMS or any(map(path.match, TEXT_FILES))
        for half in halves
        for path in half.iterdir()
    )


def write_store(
    folder: Path,
    source: Path,
    tensors: dict[str, Any],
    *,
    bits: int | None = None,
    text_files: Sequence[str] = (),
) -> None:
    """Writes one half of a converted pair.

    Args:
        folder: The folder to fill, which is empty.
        source: The folder of the checkpoint whose settings are kept.
        tensors: The weights by name, and the maps of an EAGLE-3 head.
        bits: The bits of quantized matrices; `None` if there are none.
        text_files: The patterns of further files that are kept, see `TEXT_FILES`.

    Raises:
        OSError: If something cannot be written.
    """
    import orbax.checkpoint as ocp

    path = folder / STORE_PARAMS
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    check_space(folder, num_bytes, min(num_bytes, _FILE_BYTES))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tensors}
    with quiet(), saving(path), ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.args.PyTreeSave(tensors, save_args=save_args)
        checkpointer.save(path.resolve(), args=arguments)
    for pattern in (*text_files, *ABOUT_DRAFTS):
        for file in source.glob(pattern):
            if file.is_file() and not file.match("*.index.json"):
                shutil.copyfile(file, folder / file.name)
    settings = read_json(source / "config.json")
    given = "dtype" if "dtype" in settings else "torch_dtype"
    dtypes = {name: str(tensors[name].dtype) for name in sorted(tensors)}
    write_json(folder / "config.json", settings | {given: str(common_dtype(dtypes))})
    listed = {name: {"dtype": dtype} for name, dtype in dtypes.items()}
    write_json(folder / STORE_LIST, {"bits": bits, "tensors": listed})


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
