"""Medusa's heads as they are stored, in both layouts of the official code.

`L` blocks, head `i`, as `[out, in]`:

    {i}.{j}.linear.weight [E, E], {i}.{j}.linear.bias [E]    for j < L
    {i}.{L}.weight [V, E]    only where heads have output heads of their own

`config.json` names too few heads in published folders: the file decides.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import jax

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.errors import InputError
from eagle_jax.heads.levels import LevelHeads, num_rows
from eagle_jax.heads.loss import Batch, Metrics, level_loss
from eagle_jax.heads.medusa.draft import MedusaHeads
from eagle_jax.heads.medusa.model import (
    MedusaConfig,
    MedusaParams,
    forward,
    init_params,
)
from eagle_jax.heads.settings import LevelLoss, LevelSettings
from eagle_jax.models.transformer import TransformerConfig, output_head

# Where the heads are part of a whole model's state, whose other tensors are left out.
_PREFIX = "medusa_head."


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaSettings(LevelSettings):
    """The settings of new heads of Medusa, see `LevelSettings`."""

    kind: Literal["medusa"] = "medusa"


class Medusa(LevelHeads):
    """See `Head`."""

    name = family = "medusa"
    title = "Medusa heads"
    config, settings = MedusaConfig, MedusaSettings
    files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
    published = 5, 1
    init = staticmethod(init_params)

    def read_config(
        self, folder: Path, target: TransformerConfig | None = None
    ) -> MedusaConfig:
        """See `Head.read_config`; names and shapes of the tensors say the sizes."""
        files = open_weights(folder)
        self.forget(files)
        prefix = _prefix(files)
        first = f"{prefix}0.0.linear.weight"
        if first not in files.names():
            raise InputError(
                f"{folder} lacks {first}: these are no Medusa heads in a layout of the "
                "official code"
            )
        block = re.escape(prefix) + r"(\d+)\.\d+\.linear\.weight"
        num_heads, num_layers = self.count(Fields.read(folder), files, block)
        last = f"{prefix}0.{num_layers}.weight"
        has_output_heads = last in files.names()
        if has_output_heads:
            vocab_size = num_rows(files, last)
        elif target is not None:
            vocab_size = target.vocab_size
        else:
            raise InputError(
                f"{folder} lacks {last}: these heads borrow the output head of their "
                "target; give the target, too"
            )
        return MedusaConfig(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=num_rows(files, first),
            vocab_size=vocab_size,
            has_output_heads=has_output_heads,
        )

    def model(self, config: MedusaConfig, dtype: str = "float32") -> MedusaHeads:
        """See `Head.model`."""
        return MedusaHeads(config=config, dtype=dtype)

    def loss(
        self,
        params: MedusaParams,
        batch: Batch,
        config: MedusaConfig,
        settings: LevelLoss,
    ) -> tuple[jax.Array, Metrics]:
        """See `Head.loss`; heads learn tokens, as published (Medusa, section 3.2)."""
        del config
        hidden = batch.features.astype(params.heads[0].blocks[0].linear.dtype)
        frozen = jax.lax.stop_gradient(output_head(batch.tables))
        logits = []
        for head in params.heads:
            table = frozen if head.output_head is None else head.output_head
            logits.append(batch.unembed(table, forward(head, hidden)))
        return level_loss(
            logits,
            batch,
            decay=settings.decay,
            learns_target=settings.labels == "target",
        )

    def layouts(self, config: MedusaConfig) -> dict[str, dict[str, str]]:
        """See `Head.layouts`."""

        def names(prefix: str) -> dict[str, str]:
            block = f"{prefix}{{}}.{{}}.linear"
            return {
                "heads.{}.blocks.{}.linear": f"{block}.weight",
                "heads.{}.blocks.{}.linear_bias": f"{block}.bias",
                "heads.{}.output_head": f"{prefix}{{}}.{config.num_layers}.weight",
            }

        return {prefix: names(prefix) for prefix in ("", _PREFIX)}

    def fields(self, config: MedusaConfig, how: Export) -> dict[str, Any]:
        """See `Head.fields`."""
        return super().fields(config, how) | {"version": "2"}

    def forget(self, files: Weights) -> None:
        """See `Head.forget`."""
        prefix = _prefix(files)
        others = [name for name in files.names() if not name.startswith(prefix)]
        files.leave_out(others, "they are no part of the heads")


def _prefix(files: Weights) -> str:
    is_inside = any(name.startswith(_PREFIX) for name in files.names())
    return _PREFIX if is_inside else ""
