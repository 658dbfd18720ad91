"""Hydra's heads as they are stored: both architectures of the official code.

`E` wide, `L` blocks, head `i`, as `[out, in]`; a linear layer has a weight and a bias:

    hydra_mlp.{i}.0.{linear,res_connection} [E, (i + 2) * E]    hydra_mlp.{i}.1
    hydra_mlp.{i}.{j}.linear [E, E]    for 0 < j < L            hydra_mlp.{i}.{2j + 1}
    hydra_lm_head.{i} [V, E]                                    hydra_lm_head.{i}.1
                                                                prefix_embeding_layer.*

On the left "mlp", on the right "prefix-mlp", whose prefix layer is one layer and the
norm of a Llama with the sizes of the target's layers, which no file names.
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
from eagle_jax.checkpoints.heads import check_pair, check_size, num_rows
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.load import (
    check_shapes,
    load_params,
    shapes_of,
    weights_dtype,
)
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.errors import InputError
from eagle_jax.models import hydra_heads
from eagle_jax.models.hydra_heads import HydraConfig, HydraParams
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import TransformerConfig, TransformerParams

MLP, PREFIX_MLP = "mlp", "prefix-mlp"
"""The values of `hydra_head_arch` without and with a prefix layer."""

# Copies of the target's embedding table: one is never read, one only while training.
_UNUSED = ("prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")


def hydra_config(folder: Path, layer: LayerConfig | None = None) -> HydraConfig:
    """Reads the sizes of Hydra's heads from the names and shapes of their tensors.

    Args:
        folder: The folder of the heads, from `resolve`.
        layer: The sizes of the target's layers, which the files do not say and a prefix
            layer has; it is a Llama's whatever the target is.

    Returns:
        The heads' sizes.

    Raises:
        InputError: If the files hold no Hydra heads, or others than they should.
    """
    return _open(folder, layer)[0]


def load_hydra(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[HydraConfig, HydraParams]:
    """Loads Hydra's heads.

    Args:
        folder: The folder of the heads, from `resolve`.
        target: The target's sizes.
        target_params: The target's weights; heads borrow its embedding table when they
            are joined with them.
        dtype: The dtype of the weights; `None` for the one they are stored in.
        shardings: A `jax.sharding.Sharding` for all weights, or one for each in a
            `HydraParams`; `None` for the default device.

    Returns:
        The heads' sizes and weights.

    Raises:
        InputError: If the heads cannot be used, or do not fit the target.
    """
    del target_params
    config, files, wanted, shapes = _open(folder, target.layer)
    check_pair(target, config)
    kind = weights_dtype(files, dtype)
    return config, load_params(files, wanted, shapes, kind, shardings)


def export_hydra(
    folder: Path,
    config: HydraConfig,
    params: HydraParams,
    *,
    base_model: str,
    dtype: str = "float32",
    with_pt: bool | None = None,
    overwrite: bool = False,
) -> None:
    """Writes Hydra's heads in the layout of the published ones, and reads them back.

    The same weights give the same bytes, whatever the folder's name.

    Args:
        folder: The folder to write: `config.json`, `hydra_lm_head.safetensors` and
            `hydra_lm_head.pt`.
        config: The heads' sizes.
        params: The heads' weights.
        base_model: The name of the target, which the official code loads.
        dtype: The dtype of the files: "float32", "bfloat16" or "float16".
        with_pt: Whether to write the `.pt` file, which needs torch and is the one that
            the official code reads; `None` writes it where torch is installed.
        overwrite: Whether to replace an earlier export.

    Raises:
        InputError: If a weight does not fit into `dtype`, or the folder cannot be
            written.
    """
    shapes = shapes_of(hydra_heads.init_params, config)
    fields = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": MLP if config.layer is None else PREFIX_MLP,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": base_model,
        "torch_dtype": dtype,
        "written_by": WRITTEN_BY,
    }
    write_export(
        folder,
        fields,
        host_tensors(params, shapes, _table(config), dtype),
        config,
        lambda new: hydra_config(new, config.layer),
        ("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
        with_pickle=with_pt,
        overwrite=overwrite,
    )


def _open(
    folder: Path, layer: LayerConfig | None
) -> tuple[HydraConfig, Weights, Any, HydraParams]:
    """Returns sizes, files, and the names and shapes of the tensors, all checked."""
    fields, files = Fields.read(folder), open_weights(folder)
    has_prefix = _has_prefix(fields)
    for name in _UNUSED:
        files.forget(name)
    number = 1 if has_prefix else 0
    first = f"hydra_mlp.0.{number}.linear.weight"
    last = f"hydra_lm_head.0{'.1' if has_prefix else ''}.weight"
    for name in (first, last):
        if name not in files.names():
            raise InputError(
                f"{folder} lacks {name}: these are no Hydra heads of hydra_head_arch "
                f"{PREFIX_MLP if has_prefix else MLP}"
            )
    block = re.compile(r"hydra_mlp\.(\d+)\.\d+\.linear\.weight")
    heads = [m[1] for name in files.names() if (m := block.fullmatch(name))]
    num_layers = heads.count("0")
    if fields.size("hydra_num_layers", default=num_layers) != num_layers:
        raise fields.refusal(
            f"hydra_num_layers = {fields.get('hydra_num_layers')}, but the file has "
            f"{num_layers} for each head"
        )
    width, vocab_size = num_rows(files, first), num_rows(files, last)
    if has_prefix:
        if layer is None:
            raise fields.refusal(
                "the prefix layer has the sizes of the target's layers; give the "
                "target, too"
            )
        check_size("hidden_size", width, layer.hidden_size)
    config = HydraConfig(
        num_heads=len(set(heads)),
        num_layers=num_layers,
        hidden_size=width,
        vocab_size=vocab_size,
        layer=layer.plain if has_prefix and layer is not None else None,
    )
    shapes = shapes_of(hydra_heads.init_params, config)
    wanted = names.tensor_names(shapes, _table(config))
    wants = "the first head and the target's layers ask for"
    check_shapes(files, wanted, shapes, wants)
    return config, files, wanted, shapes


def _has_prefix(fields: Fields) -> bool:
    """Returns whether there is a prefix layer, or refuses what the heads do instead."""
    arch = fields.get("hydra_head_arch", MLP)
    if arch not in (MLP, PREFIX_MLP):
        raise fields.refusal(
            f"hydra_head_arch = {arch!r} is not supported; known are {MLP} and "
            f"{PREFIX_MLP}"
        )
    if not fields.flag("grounded_heads", default=True):
        raise fields.refusal(
            "grounded_heads = false is not supported: heads that do not read drafted "
            "tokens are Medusa's"
        )
    offset = fields.get("hidden_state_offset", 0)
    if offset != 0:
        raise fields.refusal(
            f"hidden_state_offset = {offset} is not supported, only 0: the heads read "
            "the target's last hidden state"
        )
    return arch == PREFIX_MLP


def _table(config: HydraConfig) -> dict[str, str]:
    return names.hydra_heads(
        config.num_heads, config.num_layers, has_prefix=config.layer is not None
    )
