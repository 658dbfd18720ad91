"""Quantized targets over several devices."""

import pytest
from jax.sharding import AbstractMesh

from eagle_jax.checkpoints.load import target_shapes
from eagle_jax.parallel import PairSharding, split_rules
from eagle_jax.parallel.placement import target_shardings
from tests.helpers import refused
from tests.tiny import target_config

_CONFIG = target_config(num_layers=1)


def _sharding(tensor: int) -> PairSharding:
    mesh = AbstractMesh((1, 1, tensor), ("data", "kv", "query"))
    return PairSharding(mesh=mesh, target=split_rules(mesh, _CONFIG.layer))


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_and_scales_lie_as_their_matrix_does(bits: int) -> None:
    shapes = target_shapes(_CONFIG, bits)
    shardings = target_shardings(_sharding(2), _CONFIG, bits)
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
    target_shardings(_sharding(4), _CONFIG, 8)
    refused(
        lambda: target_shardings(_sharding(4), _CONFIG, 4),
        "int4 weights",
        "groups of",
        "tensor axis",
    )
