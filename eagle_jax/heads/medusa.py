"""Medusa's heads: each predicts one position further, all from one hidden state.

Head `i` reads the target's last hidden state at position `t`, after the final norm,
and predicts token `t + 2 + i`; no head sees what another drafted (Medusa, section 3.1).

In both layouts of the official code `L` blocks of head `i` are, as `[out, in]`:

    {i}.{j}.linear.weight [E, E], {i}.{j}.linear.bias [E]    for j < L
    {i}.{L}.weight [V, E]    only where heads have output heads of their own

`config.json` names too few heads in published folders: the file decides.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import open_weights
from eagle_jax.errors import InputError
from eagle_jax.heads.head import HeadParams
from eagle_jax.heads.levels import (
    PositionHeads,
    ResidualBlockParams,
    init_block,
    num_rows,
    residual_block,
)
from eagle_jax.heads.loss import Batch
from eagle_jax.heads.settings import LevelSettings
from eagle_jax.models.linear import init_matrix
from eagle_jax.models.transformer import (
    TransformerConfig,
    output_head,
    unembed,
    unembed_by,
)
from eagle_jax.prng import own_keys

# Where the heads are part of a whole model's state, whose other tensors are left out.
_PREFIX = "medusa_head."


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The sizes of Medusa's heads.

    Attributes:
        num_heads: The number of heads.
        num_layers: The number of residual blocks of each head.
        hidden_size: The width of the target, `E`.
        vocab_size: The number of tokens the target knows, `V`.
        has_output_heads: Whether each head has an output head of its own; if not, all
            borrow the target's.
    """

    num_heads: int
    hidden_size: int
    vocab_size: int
    num_layers: int = 1
    has_output_heads: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaSettings(LevelSettings):
    """The settings of new heads of Medusa, see `LevelSettings`."""

    kind: Literal["medusa"] = "medusa"


@struct.dataclass(kw_only=True)
class MedusaHeadParams:
    """The weights of one head.

    Attributes:
        blocks: The residual blocks, in order.
        output_head: `[E, V]`, the output head; `None` for the target's.
    """

    blocks: tuple[ResidualBlockParams, ...]
    output_head: jax.Array | None = None


@struct.dataclass(kw_only=True)
class MedusaParams:
    """The weights of all heads.

    Attributes:
        heads: The heads, that of the root's children first.
    """

    heads: tuple[MedusaHeadParams, ...]


class MedusaHeads(PositionHeads):
    """Medusa's heads, of which head `i` drafts depth `i + 1`.

    No head sees a drafted token: all nodes of a level have the same children.
    """

    name = "medusa"
    title = "Medusa heads"
    files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
    Config, Settings = MedusaConfig, MedusaSettings
    published = 5, 1
    labels = "tokens"  # Medusa, section 3.2.

    @classmethod
    def read_config(
        cls, folder: Path, target: TransformerConfig | None = None
    ) -> MedusaConfig:
        files = open_weights(folder)
        is_inside = any(name.startswith(_PREFIX) for name in files.names())
        prefix = _PREFIX if is_inside else ""
        first = f"{prefix}0.0.linear.weight"
        if first not in files.names():
            raise InputError(
                f"{folder} lacks {first}: these are no Medusa heads in a layout of the "
                "official code"
            )
        block = re.escape(prefix) + r"(\d+)\.\d+\.linear\.weight"
        num_heads, num_layers = cls.count(Fields.read(folder), files, block)
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

    def tensor_names(self) -> dict[str, dict[str, str]]:
        def names(prefix: str) -> dict[str, str]:
            block = f"{prefix}{{}}.{{}}.linear"
            return {
                "heads.{}.blocks.{}.linear": f"{block}.weight",
                "heads.{}.blocks.{}.linear_bias": f"{block}.bias",
                "heads.{}.output_head": f"{prefix}{{}}.{self.config.num_layers}.weight",
            }

        return {prefix: names(prefix) for prefix in ("", _PREFIX)}

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        return super().to_hf_config(how) | {"version": "2"}

    def init(self, key: jax.Array, dtype: str = "float32") -> MedusaParams:
        # The blocks change nothing, and the output heads are random.
        config, kind = self.config, jnp.dtype(dtype)
        shape = config.hidden_size, config.vocab_size
        has_own = config.has_output_heads
        heads = tuple(
            MedusaHeadParams(
                blocks=(init_block(config.hidden_size, kind),) * config.num_layers,
                output_head=init_matrix(head_key, shape, kind) if has_own else None,
            )
            for head_key in jax.random.split(own_keys(key), config.num_heads)
        )
        return MedusaParams(heads=heads)

    def position_logits(self, params: MedusaParams, batch: Batch) -> list[jax.Array]:
        hidden = batch.features.astype(params.heads[0].blocks[0].linear.dtype)
        frozen = jax.lax.stop_gradient(output_head(batch.tables))
        logits = []
        for head in params.heads:
            table = frozen if head.output_head is None else head.output_head
            logits.append(batch.unembed(table, _states(head, hidden)))
        return logits

    def extend(
        self, params: HeadParams, above: jax.Array, tokens: jax.Array
    ) -> jax.Array:
        return above[:, :1]  # Every node passes on what the root was given.

    def logits(
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        head = params.head.heads[level - 1]
        states, own = _states(head, outputs), head.output_head
        return unembed_by(params, states) if own is None else unembed(own, states)


def _states(params: MedusaHeadParams, hidden: jax.Array) -> jax.Array:
    """Returns the states `[..., E]` that a head's output head reads."""
    x = hidden.astype(params.blocks[0].linear.dtype)
    for block in params.blocks:
        x = residual_block(block, x)
    return x
