"""A pair of Hugging Face folders, converted into one folder of ours."""

from collections.abc import Callable
from pathlib import Path

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.hf_config import head_config
from eagle_jax.checkpoints.load import (
    check_pair,
    load_head,
    load_target,
    open_target,
    target_bits,
)
from eagle_jax.checkpoints.orbax_store import is_store, open_weights, write_store
from eagle_jax.files import check_apart, new_folder

_TARGET, _HEAD = "target", "head"


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
    """Writes `target/` and `head/`, which `load_target` and `load_head` accept.

    A head's own embedding table is left out where it equals the target's.

    Args:
        output: The folder to write.
        target: From `resolve`.
        head: Likewise, or `None` for the target alone.
        dtype: Of the stored weights; `None` for the type of each checkpoint.
        bits: 8 or 4 to quantize the target, see `load_target`.
        overwrite: Replace an earlier conversion.
        report: Called with a line when the checks are done and the work begins.

    Raises:
        InputError: If the pair cannot be used, a weight does not fit into `dtype`, or
            `output` cannot be written.
    """
    config, files = open_target(target)
    target_bits(files, config, bits)
    check_apart(output, target)
    if head is not None:
        check_pair(config, head_config(head))
        open_weights(head)
        check_apart(output, head)
    with new_folder(output, overwrite=overwrite, is_ours=is_pair) as unfinished:
        report(f"converting {target}")
        _, params = load_target(target, dtype, bits=bits)
        (unfinished / _TARGET).mkdir()
        write_store(
            unfinished / _TARGET, target, params, names.TRANSFORMER, with_text=True
        )
        if head is not None:
            _, head_params = load_head(head, config, params, dtype)
            (unfinished / _HEAD).mkdir()
            write_store(
                unfinished / _HEAD,
                head,
                head_params,
                names.EAGLE_HEAD,
                with_text=False,
            )


def is_pair(folder: Path) -> bool:
    """Returns whether a folder holds a converted pair and nothing else."""
    return all(
        path.is_dir() and path.name in (_TARGET, _HEAD) and is_store(path)
        for path in folder.iterdir()
    )
