"""The shardings of every array: logical axes, and the mesh axes that they take.

Weights are split as in Megatron: q, k, v, gate and up over their outputs, output and
down over their inputs, so that a layer needs two all-reduces and nothing else.
Embedding and output head are split over the vocabulary. Of experts whose parts would be
narrow, devices hold whole ones.

The layer of an EAGLE head that fuses embedding and feature is whole on every device:
split over either axis, it would split the features too, and through them the residual
stream of head and target, whose norms then wait for each other in every layer. So are
the blocks of Medusa's and Hydra's heads, which read features as well.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.mlp import splits_experts
from eagle_jax.parallel.mesh import DATA, TENSOR

AnyMesh = Mesh | AbstractMesh

Rules = Mapping[str, tuple[str, ...]]
"""The mesh axes of each logical axis; one without an entry is whole on every device."""

_MATRIX_AXES = {
    "embedding": ("vocabulary", "embed"),
    "output_head": ("embed", "vocabulary"),
    "query": ("embed", "heads"),
    "key": ("embed", "kv_heads"),
    "value": ("embed", "kv_heads"),
    "output": ("heads", "embed"),
    "gate": ("embed", "intermediate"),
    "up": ("embed", "intermediate"),
    "down": ("intermediate", "embed"),
    "router": ("embed", "scores"),
    "fc": ("fused", "embed"),
    "linear": ("fused", "embed"),
    "residual": ("fused", "embed"),
    "before": ("vocabulary", "rank"),
    "after": ("rank", "vocabulary"),
}
PARAM_AXES: Mapping[str, tuple[str, ...]] = {
    **_MATRIX_AXES,
    **{f"{name}_bias": axes[1:] for name, axes in _MATRIX_AXES.items()},
    "out_bias": ("embed",),
    "output_bias": ("vocabulary",),  # Of an output head; `output` has `out_bias`.
    "norm": ("embed",),
    "input_norm": ("embed",),
    "mlp_norm": ("embed",),
    "output_norm": ("embed",),
    "mlp_output_norm": ("embed",),
    "embedding_norm": ("embed",),
    "feature_norm": ("embed",),
    "query_norm": ("head",),
    "key_norm": ("head",),
    "fc_norm": ("feature",),
    "sinks": ("heads",),
    "offsets": ("choices",),
}
"""The logical axes of every weight of targets and heads, by the name of its field."""

CACHE_AXES = ("batch", "kv_heads", "slots", "head")
"""The logical axes of keys and of values."""

_SPLIT: Rules = {
    "batch": (DATA,),
    "vocabulary": TENSOR,
    "heads": TENSOR,
    "intermediate": TENSOR,
}

WHOLE: Rules = {"batch": (DATA,)}
"""The rules by which every device has all weights, and its own rows of the batch."""


def split_rules(mesh: AnyMesh, layer: LayerConfig) -> Rules:
    """Returns the rules of a model whose every matrix is split.

    Its key/value heads take as many of the tensor axes as divide them: where they
    are fewer than the devices, some devices hold the same.

    Args:
        mesh: The mesh that `make_mesh` returned.
        layer: The sizes of the model's layers.
    """
    axes = TENSOR
    while layer.num_kv_heads % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    num_parts = math.prod(mesh.shape[axis] for axis in TENSOR)
    rules = {**_SPLIT, "kv_heads": axes}
    if splits_experts(layer.num_experts, layer.inner_size, num_parts):
        rules |= {"experts": TENSOR}
    return rules


def draft_rules(mesh: AnyMesh, layer: LayerConfig | None, params: Any) -> Rules:
    """Returns the rules of a draft model.

    It is split like the target, or else, where the tensor axes do not divide one of
    its sizes, whole on every device: it is small.

    Args:
        mesh: The mesh that `make_mesh` returned.
        layer: The sizes of the draft model's layers; `None` if it has none.
        params: The draft model's weights, or their shapes.
    """
    num_parts = math.prod(mesh.shape[axis] for axis in TENSOR)
    if layer is not None and layer.num_heads % num_parts:
        return WHOLE
    rules = _SPLIT if layer is None else split_rules(mesh, layer)

    def divides(leaf: Any, sharding: NamedSharding) -> bool:
        sizes = zip(leaf.shape, sharding.spec, strict=True)
        return all(size % num_parts == 0 for size, axes in sizes if axes == TENSOR)

    shardings = param_shardings(mesh, rules, params)
    can_split = jax.tree.all(jax.tree.map(divides, params, shardings))
    return rules if can_split else WHOLE


def param_shardings(mesh: AnyMesh, rules: Rules, params: Any) -> Any:
    """Returns the sharding of each weight.

    Args:
        mesh: The mesh that `make_mesh` returned.
        rules: The model's rules.
        params: A pytree of weights or of their shapes.

    Returns:
        A pytree of `NamedSharding` of the same structure.

    Raises:
        KeyError: If a weight has no entry in `PARAM_AXES`.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # One of a field's several weights has a number, and the axes of the field.
        fields = [key.name for key in path if isinstance(key, GetAttrKey)]
        name = fields[-1]
        # Integers and scales of a quantized matrix are sharded as the matrix is.
        axes = PARAM_AXES[fields[-2] if name in ("values", "scales") else name]
        if name == "scales" and leaf.shape[-2] == 1:
            axes = ("all rows", axes[1])
        if "experts" in fields:
            axes = ("whole",) * len(axes) if "experts" in rules else axes
            axes = ("experts", *axes)
        assert len(axes) == len(leaf.shape), path
        return NamedSharding(mesh, _spec(rules, axes))

    return jax.tree_util.tree_map_with_path(sharding, params)


def row_shardings(mesh: AnyMesh, target: Rules, drafter: Rules, rows: Any) -> Any:
    """Returns the sharding of each array of a batch: requests, states and caches.

    Args:
        mesh: The mesh that `make_mesh` returned.
        target: The rules of the model whose keys and values the arrays hold.
        drafter: The rules of the model whose keys and values are below a field that is
            named after a drafter.
        rows: A pytree of arrays whose first axis is `B`.

    Returns:
        A pytree of `NamedSharding` of the same structure.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, KeyValues):
            return NamedSharding(mesh, _spec(target, ("batch",)))
        names = (getattr(key, "name", "") for key in path)
        is_drafters = any(name.startswith("drafter") for name in names)
        spec = _spec(drafter if is_drafters else target, CACHE_AXES)
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), leaf)

    return jax.tree_util.tree_map_with_path(
        sharding, rows, is_leaf=lambda leaf: isinstance(leaf, KeyValues)
    )


def _spec(rules: Rules, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(rules.get(axis) for axis in axes))
