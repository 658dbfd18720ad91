"""Hydra's heads as they are stored: both architectures of the official code.

`E` wide, `L` blocks, head `i`, as `[out, in]`; a linear layer has a weight and a bias:

    hydra_mlp.{i}.0.{linear,res_connection} [E, (i + 2) * E]    hydra_mlp.{i}.1
    hydra_mlp.{i}.{j}.linear [E, E]    for 0 < j < L            hydra_mlp.{i}.{2j + 1}
    hydra_lm_head.{i} [V, E]                                    hydra_lm_head.{i}.1
                                                                prefix_embeding_layer.*

On the left "mlp", on the right "prefix-mlp", whose prefix layer is one layer and the
norm of a Llama with the sizes of the target's layers, which no file names.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.names import LAYER
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.errors import InputError
from eagle_jax.heads.head import check_size
from eagle_jax.heads.hydra.draft import HydraHeads, PrefixHydraHeads
from eagle_jax.heads.hydra.loss import hydra_loss
from eagle_jax.heads.hydra.model import (
    HydraConfig,
    init_params,
)
from eagle_jax.heads.levels import LevelHeads, num_rows
from eagle_jax.heads.settings import LevelSettings
from eagle_jax.models.transformer import TransformerConfig

_MLP, _PREFIX_MLP = "mlp", "prefix-mlp"
# Copies of the target's embedding table: one is never read, one only while training.
_UNUSED = ("prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraSettings(LevelSettings):
    """The settings of new heads of Hydra++, see `LevelSettings`."""

    kind: Literal["hydra"] = "hydra"


class Hydra(LevelHeads):
    """See `Head`."""

    name = family = "hydra"
    title = "Hydra heads"
    config, settings = HydraConfig, HydraSettings
    files = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
    published = 4, 4
    init = staticmethod(init_params)
    loss = staticmethod(hydra_loss)

    def read_config(
        self, folder: Path, target: TransformerConfig | None = None
    ) -> HydraConfig:
        """See `Head.read_config`; names and shapes of the tensors say most sizes.

        A prefix layer is a Llama's, whatever the target's layers are.
        """
        fields, files = Fields.read(folder), open_weights(folder)
        has_prefix = _has_prefix(fields)
        first = f"hydra_mlp.0.{int(has_prefix)}.linear.weight"
        last = f"hydra_lm_head.0{'.1' if has_prefix else ''}.weight"
        for name in (first, last):
            if name not in files.names():
                raise InputError(
                    f"{folder} lacks {name}: these are no Hydra heads of "
                    f"hydra_head_arch {_PREFIX_MLP if has_prefix else _MLP}"
                )
        block = r"hydra_mlp\.(\d+)\.\d+\.linear\.weight"
        num_heads, num_layers = self.count(fields, files, block)
        width = num_rows(files, first)
        if has_prefix and target is None:
            raise fields.refusal(
                "the prefix layer has the sizes of the target's layers; give the "
                "target, too"
            )
        layer = target.layer if has_prefix and target is not None else None
        if layer is not None:
            check_size("hidden_size", width, layer.hidden_size)
        return HydraConfig(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=width,
            vocab_size=num_rows(files, last),
            layer=layer and layer.plain,
        )

    def model(
        self, config: HydraConfig, dtype: str = "float32"
    ) -> HydraHeads | PrefixHydraHeads:
        """See `Head.model`."""
        kind = HydraHeads if config.layer is None else PrefixHydraHeads
        return kind(config=config, dtype=dtype)

    def new(
        self, target: TransformerConfig, settings: LevelSettings, length: int
    ) -> HydraConfig:
        """See `Head.new`; the published layout has no sizes of the prefix layer."""
        heads = super().new(target, settings, length)
        return dataclasses.replace(heads, layer=target.layer.plain)

    def layouts(self, config: HydraConfig) -> dict[str, dict[str, str]]:
        """See `Head.layouts`.

        With a prefix layer, a dropout stands before each block and each output head and
        is counted, too.
        """
        has_prefix = config.layer is not None
        first, step, last = (1, 2, ".1") if has_prefix else (0, 1, "")
        table = {
            "heads.{}.output_head": f"hydra_lm_head.{{}}{last}.weight",
            "heads.{}.output_bias": f"hydra_lm_head.{{}}{last}.bias",
            "norm": "prefix_embeding_layer.norm.weight",  # Their spelling.
        }
        for ours, hf in LAYER.items():
            table[f"layer.{ours}"] = f"prefix_embeding_layer.layers.0.{hf}"
        for ours, part in (("linear", "linear"), ("residual", "res_connection")):
            name = f"hydra_mlp.{{}}.{first}.{part}"
            table[f"heads.{{}}.first.{ours}"] = f"{name}.weight"
            table[f"heads.{{}}.first.{ours}_bias"] = f"{name}.bias"
        for head in range(config.num_heads):
            for number in range(1, config.num_layers):
                path = f"heads.{head}.blocks.{number - 1}.linear"
                name = f"hydra_mlp.{head}.{first + number * step}.linear"
                table |= {path: f"{name}.weight", f"{path}_bias": f"{name}.bias"}
        return {"": table}

    def fields(self, config: HydraConfig, how: Export) -> dict[str, Any]:
        """See `Head.fields`."""
        return super().fields(config, how) | {
            "hydra_head_arch": _MLP if config.layer is None else _PREFIX_MLP,
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }

    def forget(self, files: Weights) -> None:
        """See `Head.forget`."""
        files.leave_out(_UNUSED, "the target has that table")


def _has_prefix(fields: Fields) -> bool:
    """Returns whether there is a prefix layer, or refuses what the heads do instead."""
    arch = fields.get("hydra_head_arch", _MLP)
    if arch not in (_MLP, _PREFIX_MLP):
        raise fields.refusal(
            f"hydra_head_arch = {arch!r} is not supported; known are {_MLP} and "
            f"{_PREFIX_MLP}"
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
    return arch == _PREFIX_MLP
