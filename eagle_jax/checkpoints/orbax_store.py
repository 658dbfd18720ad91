"""Converted pairs: settings as they were, weights in an Orbax folder.

    DIR/target/  config.json, the tokenizer's files, params/ (Orbax)
    DIR/head/    config.json, params/

The Orbax tree is flat: tensors by the names they have in a Hugging Face folder. A
quantized matrix is kept as its integers, `NAME.values`, and `NAME.scales`.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.hub import ABOUT_DRAFTS, TEXT_FILES
from eagle_jax.checkpoints.load import load_target, open_target, target_bits
from eagle_jax.checkpoints.tensors import saving
from eagle_jax.checkpoints.weights import STORE_PARAMS, common_dtype
from eagle_jax.files import check_apart, new_folder, write_json
from eagle_jax.parsing import read_json

_TARGET, _HEAD = "target", "head"
# Slices of a large tensor can be read alone, without much of what lies around them.
_CHUNK_BYTES = 16 * 2**20


class StoredHead(Protocol):
    """A head of any kind that is opened, but whose weights are not read."""

    @property
    def folder(self) -> Path:
        """The folder that holds it."""
        ...

    def tensors(self, target: Any, dtype: str | None) -> dict[str, Any]:
        """Reads what a folder holds, by name.

        Args:
            target: The target's weights, whose tables the head borrows.
            dtype: The dtype of the weights; `None` for the one they are stored in.
        """
        ...


def convert_pair(
    output: Path,
    target: Path,
    head: StoredHead | None = None,
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
        head: The opened head; `None` for the target alone.
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
        check_apart(output, head.folder)
    with new_folder(output, overwrite=overwrite, is_ours=is_pair) as unfinished:
        report(f"converting {target}")
        _, params = load_target(target, dtype, bits=bits)
        (unfinished / _TARGET).mkdir()
        tensors = names.by_name(params, names.TRANSFORMER)
        write_store(unfinished / _TARGET, target, tensors, TEXT_FILES)
        if head is not None:
            tensors = head.tensors(params, dtype)
            (unfinished / _HEAD).mkdir()
            write_store(unfinished / _HEAD, head.folder, tensors)


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
    text_files: Sequence[str] = (),
) -> None:
    """Writes one half of a converted pair.

    Args:
        folder: The folder to fill, which is empty.
        source: The folder of the checkpoint whose settings are kept.
        tensors: The weights by name, and the maps of an EAGLE-3 head.
        text_files: The patterns of further files that are kept, see `TEXT_FILES`.
    """
    import orbax.checkpoint as ocp

    path = folder / STORE_PARAMS
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tensors}
    with _quiet(), saving(path), ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.args.PyTreeSave(tensors, save_args=save_args)
        checkpointer.save(path.resolve(), args=arguments)
    for pattern in (*text_files, *ABOUT_DRAFTS):
        for file in source.glob(pattern):
            if file.is_file() and not file.match("*.index.json"):
                shutil.copyfile(file, folder / file.name)
    settings = read_json(source / "config.json")
    given = "dtype" if "dtype" in settings else "torch_dtype"
    kind = common_dtype(
        str(tensor.dtype)
        for name, tensor in tensors.items()
        if not names.is_quantized(name)
    )
    write_json(folder / "config.json", settings | {given: str(kind)})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from logging its own tracebacks beside our one line."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
