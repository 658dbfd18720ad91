"""Medusa's heads as they are stored, in both layouts of the official code.

`L` blocks, head `i`, as `[out, in]`:

    {i}.{j}.linear.weight [E, E], {i}.{j}.linear.bias [E]    for j < L
    {i}.{L}.weight [V, E]    only where heads have output heads of their own

`config.json` names too few heads in published folders: the file decides.
"""

import re
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.export_files import (
    WRITTEN_BY,
    host_tensors,
    write_export,
)
from eagle_jax.checkpoints.heads import check_pair, num_rows
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.load import (
    check_shapes,
    load_params,
    shapes_of,
    weights_dtype,
)
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.errors import InputError
from eagle_jax.models import medusa_heads
from eagle_jax.models.medusa_heads import MedusaConfig, MedusaHeadParams
from eagle_jax.models.transformer import TransformerConfig, TransformerParams

# Where the heads are part of a whole model's state, whose other tensors are left out.
_PREFIX = "medusa_head."


def medusa_config(folder: Path, vocab_size: int | None = None) -> MedusaConfig:
    """Reads the sizes of Medusa's heads from the names and shapes of their tensors.

    Args:
        folder: The folder of the heads, from `resolve`.
        vocab_size: The number of tokens the target knows, `V`, which the files do not
            say where heads borrow its output head.

    Returns:
        The heads' sizes.

    Raises:
        InputError: If the files hold no Medusa heads, or others than they should.
    """
    return _open(folder, vocab_size)[0]


def load_medusa(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[MedusaConfig, tuple[MedusaHeadParams, ...]]:
    """Loads Medusa's heads.

    Args:
        folder: The folder of the heads, from `resolve`.
        target: The target's sizes.
        target_params: The target's weights; heads without an output head borrow it
            when they are joined with them.
        dtype: The dtype of the weights; `None` for the one they are stored in.
        shardings: A `jax.sharding.Sharding` for all weights, or one for each; `None`
            for the default device.

    Returns:
        The heads' sizes and weights.

    Raises:
        InputError: If the heads cannot be used, or do not fit the target.
    """
    del target_params
    config, files, wanted, shapes = _open(folder, target.vocab_size)
    check_pair(target, config)
    kind = weights_dtype(files, dtype)
    return config, load_params(files, wanted, shapes, kind, shardings)


def export_medusa(
    folder: Path,
    config: MedusaConfig,
    heads: tuple[MedusaHeadParams, ...],
    *,
    base_model: str,
    dtype: str = "float32",
    with_pt: bool | None = None,
    overwrite: bool = False,
) -> None:
    """Writes Medusa's heads in the layout of the published ones, and reads them back.

    The same weights give the same bytes, whatever the folder's name.

    Args:
        folder: The folder to write: `config.json`, `medusa_lm_head.safetensors` and
            `medusa_lm_head.pt`.
        config: The heads' sizes.
        heads: The heads' weights.
        base_model: The name of the target, which the official code loads.
        dtype: The dtype of the files: "float32", "bfloat16" or "float16".
        with_pt: Whether to write the `.pt` file, which needs torch and is the one that
            the official code reads; `None` writes it where torch is installed.
        overwrite: Whether to replace an earlier export.

    Raises:
        InputError: If a weight does not fit into `dtype`, or the folder cannot be
            written.
    """
    shapes = shapes_of(medusa_heads.init_params, config)
    table = names.medusa_heads(config.num_layers)
    fields = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": base_model,
        "version": "2",
        "torch_dtype": dtype,
        "written_by": WRITTEN_BY,
    }
    write_export(
        folder,
        fields,
        host_tensors({"heads": heads}, {"heads": shapes}, table, dtype),
        config,
        lambda new: medusa_config(new, config.vocab_size),
        ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
        with_pickle=with_pt,
        overwrite=overwrite,
    )


def _open(
    folder: Path, vocab_size: int | None
) -> tuple[MedusaConfig, Weights, Any, tuple[MedusaHeadParams, ...]]:
    """Returns sizes, files, and the names and shapes of the tensors, all checked."""
    fields, files = Fields.read(folder), open_weights(folder)
    stored = files.names()
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in stored) else ""
    for name in stored:
        if not name.startswith(prefix):
            files.forget(name)
    block = re.compile(re.escape(prefix) + r"(\d+)\.(\d+)\.linear\.weight")
    found = [match.groups() for name in stored if (match := block.fullmatch(name))]
    first = f"{prefix}0.0.linear.weight"
    if first not in stored:
        raise InputError(
            f"{folder} lacks {first}: these are no Medusa heads in a layout of the "
            "official code"
        )
    num_layers = sum(head == "0" for head, _ in found)
    if fields.size("medusa_num_layers", default=num_layers) != num_layers:
        raise fields.refusal(
            f"medusa_num_layers = {fields.get('medusa_num_layers')}, but the file has "
            f"{num_layers} for each head"
        )
    output_head = f"{prefix}0.{num_layers}.weight"
    if output_head in stored:
        vocab_size = num_rows(files, output_head)
    if vocab_size is None:
        raise InputError(
            f"{folder} lacks {output_head}: these heads borrow the output head of "
            "their target; give the target, too"
        )
    config = MedusaConfig(
        num_heads=len({head for head, _ in found}),
        num_layers=num_layers,
        hidden_size=num_rows(files, first),
        vocab_size=vocab_size,
        has_output_heads=output_head in stored,
    )
    shapes = shapes_of(medusa_heads.init_params, config)
    table = names.medusa_heads(num_layers, prefix)
    wanted = names.tensor_names({"heads": shapes}, table)["heads"]
    check_shapes(files, wanted, shapes, "the first head asks for")
    return config, files, wanted, shapes
