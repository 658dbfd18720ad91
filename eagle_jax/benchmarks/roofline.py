"""Predicted costs of tokens and rounds: bytes and operations over published peaks.

Nothing is measured and nothing compiled here. Of each model call the bytes that it must
read and the operations that it must do are counted from the weights' shapes, part by
part, and a part takes the longer of the two: operations over the chip's peak, or bytes
over its bandwidth. Parts run one after another, and collectives after the parts that
need them, so all are added. What no peak bounds is left out: starting a kernel, waiting
for a collective's first byte, choosing and following a tree. So a predicted time is
near a floor, but for weights that a compiler keeps on the chip from call to call, and a
prediction for a round, which starts more calls, is more hopeful than one for a token.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from eagle_jax.benchmarks.peaks import Machine
from eagle_jax.config import TreeConfig
from eagle_jax.models.attention import BLOCK
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.mlp import MixtureParams
from eagle_jax.models.quantized import QuantizedMatrix
from eagle_jax.parallel.rules import is_whole

PARTS = ("weights", "cache", "scores", "head", "collectives")
"""Names of what a call spends its time on: the layers' weights, keys and values, the
scores of attention, the output head with its logits, and the links between chips."""

SCORE_BYTES = 20
"""Bytes that a score of attention moves where it goes through main memory: a float32
that is written once and read three times, and its weight in bfloat16, written and read
once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one device does for one part of a call.

    Attributes:
        flops: The operations.
        read: The bytes that pass between the device and its main memory.
        moved: The bytes that it gets from other devices.
    """

    flops: float = 0.0
    read: float = 0.0
    moved: float = 0.0

    def seconds(self, machine: Machine) -> float:
        """Returns the least time that this takes, in seconds."""
        chip = machine.chip
        busy = max(self.flops / chip.flops, self.read / chip.bandwidth)
        return busy + (self.moved / machine.link if self.moved else 0.0)


Call = dict[str, Work]
"""The work of a model call by part, of `PARTS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices:
    """Some weights, each counted once however many devices hold it.

    Attributes:
        bytes: Their bytes, norms and biases included.
        products: The multiplications of one row with all of them.
    """

    bytes: float
    products: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a call of a model reads and multiplies with.

    Attributes:
        layer: The sizes of a layer.
        num_layers: The number of layers, `L`.
        split: The weights of all layers that devices share, without the experts of
            mixtures, but with the multiplications of those that a row meets.
        keys: The matrices of keys and values, split by heads.
        whole: The weights that every device has whole (`parallel.rules`).
        fused: The matrix that only a round's first call multiplies with, whole on every
            device: EAGLE-3's, which fuses the target's features.
        experts: The bytes of all experts; 0 where there are none.
        head: The bytes of the output head.
        tables: The bytes of the embedding table and the output head, without those that
            it borrows from the other model of the pair.
        vocab_size: The tokens that the output head scores, `V`.
        itemsize: The bytes of a key, a value and an activation.
    """

    layer: LayerConfig
    num_layers: int
    split: Matrices
    keys: Matrices
    whole: Matrices
    fused: Matrices
    experts: int
    head: int
    tables: int
    vocab_size: int
    itemsize: int

    @classmethod
    def of(
        cls,
        layer: LayerConfig,
        layers: Any,
        output_head: Any,
        *,
        dtype: str,
        tables: Any = (),
        fused: Any = (),
    ) -> "ModelSizes":
        """Returns the sizes of a decoder or of an EAGLE head.

        Args:
            layer: The sizes of a layer.
            layers: The weights of all layers, or their shapes alone: a tuple of
                `LayerParams`, or whatever a head holds besides its tables.
            output_head: `[E, V]` or `[V, E]`, the table that scores tokens.
            dtype: The type of weights, caches and activations, whatever type `layers`
                have now; quantized weights stay integers.
            tables: The tables, or their shapes, that are this model's own.
            fused: The matrix that only a round's first call multiplies with.
        """
        many = layers if isinstance(layers, tuple) else (layers,)
        mixtures = [getattr(one, "mlp", None) for one in many]
        experts = [x.experts for x in mixtures if isinstance(x, MixtureParams)]
        met = layer.experts_per_token / max(layer.num_experts, 1)
        keys, whole = _keys(layers, layer, dtype), _whole(layers, dtype)
        others = keys.bytes + whole.bytes + _bytes(experts, dtype)
        unmet = keys.products + whole.products + (1 - met) * _products(experts)
        return cls(
            layer=layer,
            num_layers=len(many),
            split=Matrices(
                bytes=_bytes(layers, dtype) - others,
                products=_products(layers) - unmet,
            ),
            keys=keys,
            whole=whole,
            fused=Matrices(bytes=_bytes(fused, dtype), products=_products(fused)),
            experts=_bytes(experts, dtype),
            head=_bytes(output_head, dtype),
            tables=_bytes(tables, dtype),
            vocab_size=math.prod(output_head.shape) // layer.hidden_size,
            itemsize=jnp.dtype(dtype).itemsize,
        )

    def share(self, machine: Machine) -> float:
        """Returns what part of its matrices each device has.

        That is all of a draft model that they do not divide evenly
        (`parallel.rules.draft_rules`); a target that they do not divide is refused
        (`parallel.mesh.check_mesh`).

        Args:
            machine: The devices that share the matrices.
        """
        divided = self.layer.num_heads, self.layer.intermediate_size, self.vocab_size
        is_even = all(size % machine.num_chips == 0 for size in divided)
        return 1 / machine.num_chips if is_even else 1.0

    def gib(self, slots: int, machine: Machine) -> float:
        """Returns the GiB that a chip holds of weights, tables and caches.

        Args:
            slots: The slots of all requests' caches together.
            machine: The devices that share the matrices.
        """
        layer, share = self.layer, self.share(machine)
        kept = max(share, 1 / layer.num_kv_heads)
        entries = 2 * slots * layer.num_kv_heads * layer.head_dim * self.num_layers
        total = (self.split.bytes + self.experts + self.tables) * share
        total += (self.keys.bytes + entries * self.itemsize) * kept
        return (total + self.whole.bytes + self.fused.bytes) / 2**30


def call_work(
    sizes: ModelSizes,
    machine: Machine,
    *,
    rows: int,
    scored: int,
    slots: int,
    batch: int = 1,
    follows: bool = False,
) -> Call:
    """Returns the work of a model call, per device.

    Attention scores a block of slots at a time (`models.attention.BLOCK`). A layer's
    scores of a block are taken to stay on the chip where they fill up to half of its
    own memory, as they do in programs that are compiled for v5e.

    Args:
        sizes: The model.
        machine: The devices that share its matrices.
        rows: The tokens of each request, `T`.
        scored: How many of them go through the output head.
        slots: The slots of the cache, `S`.
        batch: The number of requests, `B`.
        follows: Whether a call of the same model was the last one. Weights that every
            device has whole are taken to stay on the chip then, if they fill up to half
            of its own memory, and what only a round's first call needs is not read.
    """
    layer, share, tokens = sizes.layer, sizes.share(machine), batch * rows
    split, keys, whole = sizes.split, sizes.keys, sizes.whole
    fused = Matrices(bytes=0, products=0) if follows else sizes.fused
    # Keys and values are split by heads, of which a device has one at least.
    kept = max(share, 1 / layer.num_kv_heads)
    entries = 2 * batch * slots * layer.num_kv_heads * layer.head_dim
    scores = tokens * slots * layer.num_heads * share
    fits = 4 * scores * min(1, BLOCK / slots) <= machine.chip.near / 2
    stays = follows and whole.bytes <= machine.chip.near / 2
    logits = batch * scored * sizes.vocab_size
    # An expert is read if any token chooses it, here each with the same probability.
    unread = (1 - layer.experts_per_token / max(layer.num_experts, 1)) ** tokens
    # Two sums per layer and one for the rows looked up; a ring passes each sum twice.
    sums = (2 * sizes.num_layers + 1) * tokens * layer.hidden_size * sizes.itemsize
    return {
        "weights": Work(
            flops=2 * tokens * (split.products * share + keys.products * kept)
            + 2 * tokens * (whole.products + fused.products),
            read=(split.bytes + (1 - unread) * sizes.experts) * share
            + (keys.bytes * kept + (0 if stays else whole.bytes) + fused.bytes),
        ),
        "cache": Work(
            flops=4 * scores * sizes.num_layers * layer.head_dim,
            read=entries * sizes.num_layers * sizes.itemsize * kept,
        ),
        "scores": Work(read=0 if fits else scores * sizes.num_layers * SCORE_BYTES),
        "head": Work(
            flops=2 * logits * layer.hidden_size * share,
            # Logits are written in float32 and read once.
            read=(sizes.head + 8 * logits) * share,
        ),
        "collectives": Work(moved=2 * (1 - share) * sums),
    }


def token_calls(
    target: ModelSizes, machine: Machine, *, slots: int, batch: int = 1
) -> list[Call]:
    """Returns the work of a token of plain decoding.

    Args:
        target: The target.
        machine: The devices that share its matrices.
        slots: The slots of the cache, `S`.
        batch: The number of requests, `B`.
    """
    return [call_work(target, machine, rows=1, scored=1, slots=slots, batch=batch)]


def round_calls(
    target: ModelSizes,
    draft: ModelSizes,
    machine: Machine,
    tree: TreeConfig,
    *,
    slots: int,
    batch: int = 1,
) -> list[Call]:
    """Returns the work of a round: a call of the target, and one per drafted level.

    The first level reads the accepted path, `P` rows, and each later one `K` nodes.

    Args:
        target: The target.
        draft: The model that drafts.
        machine: The devices that share their matrices.
        tree: The tree.
        slots: The slots of the caches, `S`.
        batch: The number of requests, `B`.
    """
    nodes, path, width = tree.num_nodes, tree.levels + 1, tree.width

    def call(sizes: ModelSizes, rows: int, scored: int, *, follows: bool) -> Call:
        tokens = {"rows": rows, "scored": scored, "slots": slots, "batch": batch}
        return call_work(sizes, machine, follows=follows, **tokens)

    verify = call(target, nodes, nodes, follows=False)
    first = call(draft, path, 1, follows=False)
    further = call(draft, width, width, follows=True)
    return [verify, first, *[further] * (tree.levels - 1)]


def part_seconds(calls: Sequence[Call], machine: Machine) -> dict[str, float]:
    """Returns the predicted seconds of some calls, one after another, by part."""
    return {part: sum(call[part].seconds(machine) for call in calls) for part in PARTS}


def _bytes(weights: Any, dtype: str) -> int:
    def itemsize(x: Any) -> int:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.dtype(dtype if is_float else x.dtype).itemsize

    return sum(math.prod(x.shape) * itemsize(x) for x in jax.tree.leaves(weights))


def _products(weights: Any) -> int:
    """Returns how many elements all matrices have, quantized or not."""
    leaves = jax.tree.leaves(weights, is_leaf=_is_quantized)
    return sum(math.prod(x.shape) for x in leaves if len(x.shape) == 2)


def _named(weights: Any) -> list[tuple[str, Any]]:
    """Returns all weights, quantized ones in one piece, with their fields' names."""
    leaves = jax.tree.leaves_with_path(weights, is_leaf=_is_quantized)
    return [
        ([key.name for key in path if isinstance(key, GetAttrKey)][-1], leaf)
        for path, leaf in leaves
    ]


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedMatrix)


def _keys(weights: Any, layer: LayerConfig, dtype: str) -> Matrices:
    """Returns the matrices of keys and values, which may stand beside the queries'."""
    queries = [x for name, x in _named(weights) if name == "query"]
    columns = 2 * layer.num_kv_heads * layer.head_dim
    return Matrices(
        bytes=columns * sum(_bytes(x, dtype) / x.shape[1] for x in queries),
        products=columns * sum(x.shape[0] for x in queries),
    )


def _whole(weights: Any, dtype: str) -> Matrices:
    """Returns the matrices that no mesh splits; norms and biases are little."""
    named = [(name, x) for name, x in _named(weights) if len(x.shape) == 2]
    leaves = [leaf for name, leaf in named if is_whole(name)]
    return Matrices(bytes=_bytes(leaves, dtype), products=_products(leaves))
