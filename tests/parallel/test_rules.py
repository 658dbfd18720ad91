"""Where weights and caches lie, and meshes that are refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.tree_util import GetAttrKey

from eagle_jax.checkpoints.load import shapes_of, target_shapes
from eagle_jax.decoding.requests import make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.heads.eagle3 import Eagle3HeadConfig
from eagle_jax.heads.hydra import HydraConfig
from eagle_jax.models import transformer
from eagle_jax.models.cache import init_cache
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import (
    WHOLE,
    MeshShape,
    PairSharding,
    check_mesh,
    draft_rules,
    param_shardings,
    parse_mesh,
    row_shardings,
    split_rules,
)
from eagle_jax.parallel.placement import target_shardings
from eagle_jax.tree import chain
from tests import tiny
from tests.helpers import refused

# 2 x 4 devices: `G` = 8 or 4, every tensor device has its own; `G` = 2, two share one.
MESH = AbstractMesh((2, 4, 1), ("data", "kv", "query"))
SHARED_KV = AbstractMesh((2, 2, 2), ("data", "kv", "query"))
LAYER = dataclasses.replace(tiny.LAYER, num_heads=8, num_kv_heads=8)
FEW_KV = dataclasses.replace(LAYER, num_kv_heads=2)
TARGET = tiny.target_config(layer=LAYER)
# What each device of the tensor axis holds, of a layer of `LAYER`.
EXPECTED = {
    "embedding": (16, 32),
    "output_head": (32, 16),
    "query": (32, 16),
    "key": (32, 16),
    "value": (32, 16),
    "query_bias": (16,),
    "key_bias": (16,),
    "value_bias": (16,),
    "sinks": (2,),
    "output": (16, 32),
    "gate": (32, 12),
    "up": (32, 12),
    "down": (12, 32),
    "gate_bias": (12,),
    "up_bias": (12,),
}


def held(shardings: Any, arrays: Any) -> dict[str, set[tuple[int, ...]]]:
    """By the name of its field: the shapes that a device holds of a weight."""
    assert jax.tree.structure(shardings) == jax.tree.structure(arrays)
    found: dict[str, set[tuple[int, ...]]] = {}
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(arrays),
        jax.tree.leaves(shardings),
        strict=True,
    )
    for (path, array), sharding in pairs:
        assert isinstance(sharding, NamedSharding)
        name = next(key.name for key in path[::-1] if isinstance(key, GetAttrKey))
        found.setdefault(name, set()).add(sharding.shard_shape(array.shape))
    return found


def check(found: dict[str, set[tuple[int, ...]]], arrays: Any, split: Any) -> None:
    """What `split` names is held in these parts, and everything else whole."""
    whole = held(param_shardings(MESH, WHOLE, arrays), arrays)
    assert found == whole | {n: {split[n]} for n in split.keys() & whole.keys()}


@pytest.mark.parametrize("num_experts", [0, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_of_a_target_has_its_place(num_experts: int, tied: bool) -> None:
    layer = dataclasses.replace(
        LAYER,
        qkv_bias=True,
        output_bias=True,
        qk_norm=True,
        output_norms=True,
        has_sinks=True,
        mlp_bias=True,
        num_experts=num_experts,
        experts_per_token=num_experts // 2,
    )
    config = dataclasses.replace(TARGET, layer=layer, tie_embeddings=tied)
    params = shapes_of(transformer.init_params, config)
    found = held(param_shardings(MESH, split_rules(MESH, layer), params), params)
    experts: dict[str, Any] = {  # Narrow ones are whole, where devices divide them.
        0: {},
        2: {"gate": (2, 32, 12), "up": (2, 32, 12), "down": (2, 12, 32)}
        | {"gate_bias": (2, 12), "up_bias": (2, 12)},
        4: {"gate": (1, 32, 48), "up": (1, 32, 48), "down": (1, 48, 32)}
        | {"gate_bias": (1, 48), "up_bias": (1, 48), "down_bias": (1, 32)},
    }[num_experts]
    check(found, params, EXPECTED | experts)
    assert ("output_head" in found) != tied
    assert ("router" in found) == bool(num_experts)
    assert EXPECTED.keys() - found.keys() == ({"output_head"} if tied else set())


def test_every_weight_of_a_head_has_its_place() -> None:
    head = tiny.head_config(layer=LAYER)
    params = shapes_of(tiny.head_of(head).init)
    params = dataclasses.replace(params, embedding=jax.ShapeDtypeStruct((64, 32), "f4"))
    rules = draft_rules(MESH, LAYER, params)
    found = held(param_shardings(MESH, rules, params), params)
    check(found, params, EXPECTED)
    assert {"embedding", "fc", "fc_bias"} <= found.keys()


def test_every_weight_of_an_eagle3_head_has_its_place() -> None:
    head = Eagle3HeadConfig(
        draft_vocab_size=32,
        feature_size=96,
        has_feature_norms=True,
        **tiny.sizes(layer=LAYER),
    )
    params = shapes_of(tiny.head_of(head).init)
    rules = draft_rules(MESH, LAYER, params)
    found = held(param_shardings(MESH, rules, params), params)
    both = dict.fromkeys(("query", "key", "value"), (64, 16))
    check(found, params, EXPECTED | both | {"output_head": (32, 8)})
    assert {"fc", "fc_norm", "offsets"} <= found.keys()


@pytest.mark.parametrize("layer", [None, LAYER])
def test_every_weight_of_hydra_heads_has_its_place(layer: LayerConfig | None) -> None:
    config = HydraConfig(num_heads=2, hidden_size=32, vocab_size=64, layer=layer)
    params = shapes_of(tiny.head_of(config).init)
    rules = draft_rules(MESH, layer, params)
    found = held(param_shardings(MESH, rules, params), params)
    check(found, params, EXPECTED | {"output_bias": (16,)})
    assert {"linear", "linear_bias", "residual", "residual_bias"} <= found.keys()
    odd = dataclasses.replace(config, vocab_size=63)
    odd = shapes_of(tiny.head_of(odd).init)
    assert draft_rules(MESH, layer, odd) == WHOLE


def test_every_weight_of_a_block_head_has_its_place() -> None:
    head = tiny.block(64, is_next=True, layer=LAYER)
    params = shapes_of(head.init)
    rules = draft_rules(MESH, LAYER, params)
    found = held(param_shardings(MESH, rules, params), params)
    check(found, params, EXPECTED | {"before": (16, 3), "after": (3, 16)})
    assert {"fc", "linear", "feature_norm", "norm"} <= found.keys()


def test_few_key_value_heads_are_where_their_queries_are() -> None:
    params = shapes_of(
        transformer.init_params, dataclasses.replace(TARGET, layer=FEW_KV)
    )
    rules = split_rules(SHARED_KV, FEW_KV)
    found = held(param_shardings(SHARED_KV, rules, params), params)
    assert found["query"] == {EXPECTED["query"]}
    assert found["key"] == found["value"] == {(32, 8)}  # One of the two heads.


def test_a_draft_model_that_cannot_be_split_is_whole() -> None:
    for layer in (
        dataclasses.replace(LAYER, num_heads=6, num_kv_heads=2, head_dim=16),
        dataclasses.replace(LAYER, intermediate_size=50),
    ):
        head = tiny.head_config(layer=layer)
        params = shapes_of(tiny.head_of(head).init)
        assert draft_rules(MESH, layer, params) == WHOLE
        for sharding in jax.tree.leaves(param_shardings(MESH, WHOLE, params)):
            assert sharding.is_fully_replicated


@pytest.mark.parametrize("draft_layer", [LAYER, FEW_KV])
def test_every_array_of_a_state_is_split_by_rows(draft_layer: LayerConfig) -> None:
    head = tiny.head_config(layer=draft_layer)
    drafter = TreeDrafter(model=EagleHead(config=head), tree=chain(3))
    state = jax.eval_shape(lambda: _state(drafter))
    params = shapes_of(tiny.head_of(head).init)
    target, draft = split_rules(MESH, LAYER), draft_rules(MESH, draft_layer, params)
    shardings = row_shardings(MESH, target, draft, state)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    for array, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True
    ):
        assert sharding.shard_shape(array.shape)[0] == 2
    for layer in shardings.target_cache.layers:
        assert layer.keys.shard_shape((4, 8, 64, 4)) == (2, 2, 64, 4)
        assert layer.values.shard_shape((4, 8, 64, 4)) == (2, 2, 64, 4)
    (cached,) = shardings.drafter_state.cache.layers
    wanted = (2, 2, 64, 4) if draft_layer is LAYER else (2, 8, 64, 4)
    assert cached.keys.shard_shape((4, 8, 64, 4)) == wanted


def _state(drafter: TreeDrafter) -> DecodeState:
    requests = make_requests([[1]] * 4, max_new_tokens=4)
    return DecodeState(
        rows=requests.settings(),
        tokens=requests.prompts,
        lengths=requests.prompt_lengths,
        stop_reason=requests.prompt_lengths,
        target_cache=Transformer(config=TARGET).init_cache(4, 64),
        drafter_state=drafter.init_state(4, 64),
        accept_lengths=requests.prompts,
        num_rounds=requests.prompt_lengths,
        expected=requests.prompt_lengths,
    )


def test_a_weight_without_axes_is_no_silent_copy() -> None:
    cache = jax.eval_shape(
        lambda: init_cache(
            num_layers=1,
            batch=1,
            num_kv_heads=1,
            capacity=1,
            head_dim=1,
            dtype=jnp.dtype("f4"),
        )
    )
    with pytest.raises(KeyError, match="keys"):
        param_shardings(MESH, WHOLE, cache)


def test_meshes_are_read() -> None:
    assert parse_mesh("data=2,tensor=4") == MeshShape(data=2, tensor=4)
    assert parse_mesh("tensor=4,data=2") == MeshShape(data=2, tensor=4)
    assert parse_mesh("data=8") == MeshShape(data=8, tensor=1)
    assert parse_mesh(str(MeshShape(data=3, tensor=5))) == MeshShape(data=3, tensor=5)


@pytest.mark.parametrize(
    "text",
    [
        *("", "4", "tensor", "tensor=", "tensor=0", "tensor=-1", "tensor=four"),
        *("model=4", "tensor=2,tensor=4", "data=2,", "data=2 tensor=4", "tensor=1.5"),
        "tensor=9999999999",
    ],
)
def test_what_is_no_mesh_is_refused(text: str) -> None:
    refused(lambda: parse_mesh(text), repr(text), "such as data=2,tensor=4")


def _check(shape: MeshShape, target: TransformerConfig = TARGET, rows: int = 8) -> None:
    check_mesh(shape, target, batch_size=rows, num_devices=shape.num_devices)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_meshes_that_divide_are_taken(
    data: int, tensor: int, num_kv_heads: int
) -> None:
    layer = dataclasses.replace(LAYER, num_kv_heads=num_kv_heads)
    target = dataclasses.replace(TARGET, layer=layer)
    _check(MeshShape(data=data, tensor=tensor), target)


def test_meshes_that_do_not_divide_are_refused() -> None:
    def changed(vocab_size: int = 64, **sizes: int) -> TransformerConfig:
        layer = dataclasses.replace(LAYER, **sizes)
        return dataclasses.replace(TARGET, layer=layer, vocab_size=vocab_size)

    mesh = MeshShape(data=2, tensor=4)
    refused(lambda: _check(mesh, rows=3), "data = 2", "batch of 3", "multiple")
    for target, named in (
        (changed(num_heads=6, num_kv_heads=6), "6 query heads"),
        (changed(vocab_size=66), "66 tokens of the vocabulary"),
        (changed(intermediate_size=46), "46 intermediate features"),
        (changed(num_heads=24, num_kv_heads=6), "6 key/value heads"),
    ):
        refused(lambda target=target: _check(mesh, target), "tensor = 4", named, "2")


def test_as_many_devices_as_there_are_is_asked_for() -> None:
    refused(
        lambda: check_mesh(MeshShape(tensor=4), TARGET, batch_size=8, num_devices=2),
        "data=1,tensor=4",
        "for 4 devices",
        "there are 2",
    )


# Quantized targets.


def _sharding(tensor: int) -> PairSharding:
    mesh = AbstractMesh((1, 1, tensor), ("data", "kv", "query"))
    return PairSharding(mesh=mesh, target=split_rules(mesh, tiny.TARGET.layer))


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_and_scales_lie_as_their_matrix_does(bits: int) -> None:
    shapes = target_shapes(tiny.TARGET, bits)
    shardings = target_shardings(_sharding(2), tiny.TARGET, bits)
    mlp, held = shapes.layers[0].mlp, shardings.layers[0].mlp

    def parts(name: str) -> tuple[tuple[int, ...], ...]:
        weight, sharding = getattr(mlp, name), getattr(held, name)
        pairs = (weight.values, sharding.values), (weight.scales, sharding.scales)
        return tuple(one.shard_shape(leaf.shape) for leaf, one in pairs)

    rows, groups = (32, 1) if bits == 8 else (16, 2)
    assert parts("up") == ((rows, 24), (groups, 24))
    # Split over its inputs: a scale of all rows is on every device.
    assert parts("down") == ((rows * 3 // 4, 32), (1, 32))


def test_groups_that_the_mesh_does_not_divide_are_refused() -> None:
    target_shardings(_sharding(4), tiny.TARGET, 8)
    refused(
        lambda: target_shardings(_sharding(4), tiny.TARGET, 4),
        "int4 weights",
        "groups of",
        "tensor axis",
    )
