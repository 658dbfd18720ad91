"""Hydra's heads: like Medusa's, but each reads the tokens that were drafted before it.

Head `i` reads `[p, E(root), E(x_1), ..., E(x_i)]` side by side, where `p` says what
came before the root: the target's last hidden state, after the final norm, or (Hydra++,
"prefix-mlp") the output of one decoder layer over all of those (Hydra, sections 3 and
4). It predicts the token after `x_i`.

In both architectures of the official code, `E` wide, `L` blocks of head `i` are stored
as `[out, in]`; a linear layer has a weight and a bias:

    hydra_mlp.{i}.0.{linear,res_connection} [E, (i + 2) * E]    hydra_mlp.{i}.1
    hydra_mlp.{i}.{j}.linear [E, E]    for 0 < j < L            hydra_mlp.{i}.{2j + 1}
    hydra_lm_head.{i} [V, E]                                    hydra_lm_head.{i}.1
                                                                prefix_embeding_layer.*

On the left "mlp", on the right "prefix-mlp", whose prefix layer is one layer and the
norm of a Llama with the sizes of the target's layers, which no file names.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.names import LAYER
from eagle_jax.checkpoints.weights import open_weights
from eagle_jax.errors import InputError
from eagle_jax.heads.feature import contexts_of
from eagle_jax.heads.head import HeadParams, check_size
from eagle_jax.heads.levels import (
    PositionHeads,
    ResidualBlockParams,
    init_block,
    num_rows,
    residual_block,
)
from eagle_jax.heads.loss import Batch
from eagle_jax.heads.rows import segment_mask
from eagle_jax.heads.settings import LevelSettings
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import (
    AttentionContext,
    LayerConfig,
    LayerParams,
    decoder_layer,
    init_layer,
    rms_norm,
)
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.rope import rotary_tables
from eagle_jax.models.transformer import TransformerConfig, unembed
from eagle_jax.prng import own_keys

_MLP, _PREFIX_MLP = "mlp", "prefix-mlp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """The sizes of Hydra's heads.

    Attributes:
        num_heads: The number of heads.
        num_layers: The number of blocks of each head, the first one included.
        hidden_size: The width of the target, `E`.
        vocab_size: The number of tokens the target knows, `V`.
        layer: The sizes of the prefix layer; `None` for heads that read the target's
            hidden state itself.
    """

    num_heads: int
    hidden_size: int
    vocab_size: int
    num_layers: int = 4
    layer: LayerConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraSettings(LevelSettings):
    """The settings of new heads of Hydra++, see `LevelSettings`."""

    kind: Literal["hydra"] = "hydra"


@struct.dataclass(kw_only=True)
class FirstBlockParams:
    """The weights of a head's first block; `i + 2` states of width `E` go in.

    Attributes:
        linear: `[(i + 2) * E, E]`, the matrix inside SiLU.
        linear_bias: `[E]`, its bias.
        residual: `[(i + 2) * E, E]`, the matrix beside it.
        residual_bias: `[E]`, its bias.
    """

    linear: jax.Array
    linear_bias: jax.Array
    residual: jax.Array
    residual_bias: jax.Array


@struct.dataclass(kw_only=True)
class HydraHeadParams:
    """The weights of one head.

    Attributes:
        first: The first block.
        blocks: The residual blocks after it, in order.
        output_head: `[E, V]`, the output head.
        output_bias: `[V]`, its bias.
    """

    first: FirstBlockParams
    blocks: tuple[ResidualBlockParams, ...]
    output_head: jax.Array
    output_bias: jax.Array


@struct.dataclass(kw_only=True)
class HydraParams:
    """The weights of all heads.

    Attributes:
        heads: The heads, that of the root's children first.
        layer: The prefix layer, with input norm; `None` for none.
        norm: `[E]`, the norm after the prefix layer; `None` for none.
    """

    heads: tuple[HydraHeadParams, ...]
    layer: LayerParams | None = None
    norm: jax.Array | None = None


class HydraHeads(PositionHeads):
    """Hydra's heads, maybe behind a prefix layer.

    The output of a node is `[p, E(root), E(x_1), ..., E(x_d)]` side by side: `X` is
    `(d + 2) * E` at depth `d`.
    """

    name = "hydra"
    title = "Hydra heads"
    files = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
    Config, Settings = HydraConfig, HydraSettings
    published = 4, 4
    labels = "target"  # Hydra, section 4.
    borrows_output_head = False

    @classmethod
    def read_config(
        cls, folder: Path, target: TransformerConfig | None = None
    ) -> HydraConfig:
        # Names and shapes of the tensors say most sizes. A prefix layer is a Llama's,
        # whatever the target's layers are.
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
        num_heads, num_layers = cls.count(fields, files, block)
        width, layer = num_rows(files, first), None
        if has_prefix:
            if target is None:
                raise fields.refusal(
                    "the prefix layer has the sizes of the target's layers; give the "
                    "target, too"
                )
            layer = target.layer.plain
            check_size("hidden_size", width, layer.hidden_size)
        return HydraConfig(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=width,
            vocab_size=num_rows(files, last),
            layer=layer,
        )

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: LevelSettings, length: int
    ) -> HydraConfig:
        # The published layout has no sizes of the prefix layer.
        heads = super().default_config(target, settings, length)
        return dataclasses.replace(heads, layer=target.layer.plain)

    def tensor_names(self) -> dict[str, dict[str, str]]:
        # With a prefix layer, a dropout stands before each block and each output head
        # and is counted, too.
        has_prefix = self.config.layer is not None
        first, step, last = (1, 2, ".1") if has_prefix else (0, 1, "")
        table = {
            "heads.{}.output_head": f"hydra_lm_head.{{}}{last}.weight",
            "heads.{}.output_bias": f"hydra_lm_head.{{}}{last}.bias",
            "norm": "prefix_embeding_layer.norm.weight",  # Their spelling.
            # One is never read, one only while training.
            "target.embedding.0": "prefix_embeding_layer.embed_tokens.weight",
            "target.embedding.1": "input_embed_fn.weight",
        }
        for ours, hf in LAYER.items():
            table[f"layer.{ours}"] = f"prefix_embeding_layer.layers.0.{hf}"
        for ours, part in (("linear", "linear"), ("residual", "res_connection")):
            name = f"hydra_mlp.{{}}.{first}.{part}"
            table[f"heads.{{}}.first.{ours}"] = f"{name}.weight"
            table[f"heads.{{}}.first.{ours}_bias"] = f"{name}.bias"
        for head in range(self.config.num_heads):
            for number in range(1, self.config.num_layers):
                path = f"heads.{head}.blocks.{number - 1}.linear"
                name = f"hydra_mlp.{head}.{first + number * step}.linear"
                table |= {path: f"{name}.weight", f"{path}_bias": f"{name}.bias"}
        return {"": table}

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        return super().to_hf_config(how) | {
            "hydra_head_arch": _MLP if self.config.layer is None else _PREFIX_MLP,
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }

    def init(self, key: jax.Array, dtype: str = "float32") -> HydraParams:
        config, kind, width = self.config, jnp.dtype(dtype), self.config.hidden_size
        layer_key, *head_keys = jax.random.split(own_keys(key), 1 + config.num_heads)

        def init_head(key: jax.Array, num_states: int) -> HydraHeadParams:
            residual_key, head_key = jax.random.split(key)
            shape = (num_states * width, width)
            return HydraHeadParams(
                first=FirstBlockParams(
                    linear=jnp.zeros(shape, kind),
                    linear_bias=jnp.zeros(width, kind),
                    residual=init_matrix(residual_key, shape, kind),
                    residual_bias=jnp.zeros(width, kind),
                ),
                blocks=(init_block(width, kind),) * (config.num_layers - 1),
                output_head=init_matrix(head_key, (width, config.vocab_size), kind),
                output_bias=jnp.zeros(config.vocab_size, kind),
            )

        layer = config.layer
        return HydraParams(
            heads=tuple(init_head(k, 2 + i) for i, k in enumerate(head_keys)),
            layer=layer and init_layer(layer_key, layer, kind, input_norm=True),
            norm=None if layer is None else jnp.ones(width, kind),
        )

    def position_logits(self, params: HydraParams, batch: Batch) -> list[jax.Array]:
        # Head `i` reads feature `t`, or the prefix layer's output there, and the true
        # tokens `t + 1` to `t + 1 + i`.
        rows, dtype = batch.rows, params.heads[0].first.linear.dtype
        table = jax.lax.stop_gradient(batch.tables.embedding)
        start = batch.features.astype(dtype)
        empty = dataclasses.replace(self, dtype=dtype.name).init_state(len(start), 0, 0)
        start, _ = self.run(
            HeadParams(head=params, embedding=table),
            rows.tokens,
            start,
            rows.positions,
            contexts_of(empty.cache, segment_mask(rows.segments)),
        )
        logits, inputs = [], [start]
        for level, head in enumerate(params.heads):
            following = jnp.roll(rows.tokens, -1 - level, axis=1)
            inputs.append(table[following].astype(dtype))
            logits.append(_head_logits(head, jnp.concatenate(inputs, axis=-1)))
        return logits

    def run(
        self,
        params: HeadParams,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        contexts: Sequence[AttentionContext],
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KeyValues, ...]]:
        weights, layer = params.head, self.config.layer
        if layer is None:
            return super().run(params, tokens, features, positions, contexts, last)
        rotary = rotary_tables(positions, layer.rope, layer.head_dim)
        x = features.astype(weights.layer.mlp_norm.dtype)
        x, new = decoder_layer(weights.layer, layer, x, rotary, *contexts, last=last)
        return rms_norm(x, weights.norm, layer.rms_norm_eps), (new,)

    def read(
        self, params: HeadParams, state: Any, root: jax.Array
    ) -> tuple[jax.Array, Any]:
        output, state = super().read(params, state, root)
        return self.extend(params, output, root), state

    def extend(
        self, params: HeadParams, above: jax.Array, tokens: jax.Array
    ) -> jax.Array:
        embedded = params.embedding[tokens]
        return jnp.concatenate([above.astype(embedded.dtype), embedded], axis=-1)

    def logits(
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        return _head_logits(params.head.heads[level - 1], outputs)


def _head_logits(params: HydraHeadParams, inputs: jax.Array) -> jax.Array:
    """Returns the logits `[..., V]` of head `i`, which reads `[..., (i + 2) * E]`."""
    first = params.first
    z = inputs.astype(first.linear.dtype)
    x = linear(z, first.residual, first.residual_bias)
    x = x + jax.nn.silu(linear(z, first.linear, first.linear_bias))
    for block in params.blocks:
        x = residual_block(block, x)
    return unembed(params.output_head, x) + params.output_bias.astype(jnp.float32)


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
