"""What a process with four devices runs for `test_mesh_decoding`.

python -m tests.parallel.on_four_devices
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.eagle import model as eagle_head
from eagle_jax.heads.eagle3 import model as eagle3_head
from eagle_jax.heads.eagle3.draft import Eagle3Head
from eagle_jax.heads.eagle3.model import Eagle3HeadConfig
from eagle_jax.heads.rows import PackedRows
from eagle_jax.interface import Params
from eagle_jax.models import transformer
from eagle_jax.models.mlp import feed_forward, init_mlp
from eagle_jax.models.quantized import quantize_layers
from eagle_jax.models.transformer import Transformer
from eagle_jax.parallel import (
    MeshShape,
    PairSharding,
    make_mesh,
    param_shardings,
    shard_pair,
    split_rules,
)
from eagle_jax.testing.programs import count_collectives, every_line
from eagle_jax.training.config import LossConfig, OptimizerConfig
from eagle_jax.training.sharding import state_shapes, state_shardings
from eagle_jax.training.step import StepConfig, train_step
from tests import tiny
from tests.parallel.on_eight_devices import REQUESTS, ROWS, SLOTS, TREE, held

VOCABULARY, KNOWN, LAYERS = 32, 16, 3
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_positions": SLOTS}


def mixtral() -> tiny.Pair:
    config = tiny.target_config(
        num_layers=1, num_experts=4, experts_per_token=2, **SIZES
    )
    return tiny.pair(config, tiny.head_config(**SIZES), TREE)


def eagle3() -> tiny.Pair:
    layers = tuple(range(LAYERS))
    config = tiny.target_config(num_layers=LAYERS, feature_layers=layers, **SIZES)
    head = Eagle3HeadConfig(
        draft_vocab_size=KNOWN,
        feature_size=config.feature_size,
        has_feature_norms=True,
        recycles_normed=True,
        **tiny.sizes(**SIZES),
    )
    target = tiny.target_params(config)
    params = eagle3_head.init_params(jax.random.key(1), head)
    return tiny.Pair(
        Transformer(config=config),
        TreeDrafter(model=Eagle3Head(config=head), tree=TREE),
        Params(target=target, drafter=Eagle3Head.join(params, target)),
    )


def decode(
    target: Transformer,
    drafter: TreeDrafter,
    params: Params,
    sharding: PairSharding | None,
) -> list[np.ndarray]:
    """Tokens, and how many drafts were accepted in each round."""
    requests, decoder = REQUESTS, Decoder(target=target, drafter=drafter)
    prefill: Any = functools.partial(speculative.prefill, decoder, num_slots=SLOTS)
    rounds: Any = functools.partial(speculative.decode, decoder)
    if sharding is not None:
        requests = sharding.put_rows(requests)
        prefill = sharding.shard(prefill)
        rounds = sharding.shard(rounds, donates_state=True)
    state = rounds(params, prefill(params, requests))
    return [np.asarray(state.tokens), np.asarray(state.accept_lengths)]


def check(
    name: str,
    target: Transformer,
    drafter: TreeDrafter,
    params: Params,
    shape: MeshShape,
) -> None:
    expected = decode(target, drafter, params, None)
    assert expected[1].sum() > 0, "drafts are accepted"
    sharding = shard_pair(shape, target.config, batch_size=ROWS).with_drafter(
        tiny.LAYER, params.drafter
    )
    shardings = Params(
        target=sharding.target_shardings(params.target),
        drafter=sharding.drafter_shardings(params.drafter),
    )
    there = jax.device_put(params, shardings)
    for weights in (there.target.layers[0], there.drafter.head.layer):
        assert held(weights.query)[1] == 32 // shape.tensor
        mlp = weights.mlp
        for expert in getattr(mlp, "experts", (mlp,)):
            assert held(expert.up) == (32, 48 // shape.tensor)
    found = decode(target, drafter, there, sharding)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    print("equal", name, shape, flush=True)


def check_experts(shape: MeshShape, bits: int | None) -> None:
    """A mixture's outputs are one device's, and summed over devices once."""
    intermediate = 512  # Of 4 bits, a pair of groups per device.
    layer = dataclasses.replace(
        tiny.LAYER, num_experts=4, experts_per_token=2, intermediate_size=intermediate
    )
    mlp = init_mlp(
        jax.random.key(0), layer.hidden_size, intermediate, jnp.float32, num_experts=4
    )
    if bits:
        mlp = quantize_layers(mlp, bits)
    mesh = make_mesh(shape, 1)
    rows = jax.random.normal(jax.random.key(1), (2, 1, layer.hidden_size))
    run: Any = functools.partial(feed_forward, experts_per_token=2)
    by_row = PartitionSpec("data")
    split = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(PartitionSpec(), by_row),
            out_specs=by_row,
            axis_names={"data"},
            check_vma=False,
        )
    )
    shardings = param_shardings(mesh, split_rules(mesh, layer), mlp)
    there = jax.device_put(mlp, shardings)
    np.testing.assert_allclose(split(there, rows), run(mlp, rows), atol=1e-5)
    compiled: Any = split.lower(there, rows).compile()
    lines = every_line(compiled.as_text())
    assert sum(" conditional(" in line for line in lines) == 4, "one per expert"
    assert count_collectives(lines) == {"all-reduce": 1}


def check_training() -> None:
    """A training step moves sums, and no weight."""
    config = tiny.target_config(num_layers=1, num_kv_heads=4, **SIZES)
    head = tiny.head_config(num_kv_heads=4, **SIZES)
    step = StepConfig(
        target=Transformer(config=config),
        head=head,
        loss=LossConfig(),
        optimizer=OptimizerConfig(),
        steps=4,
    )
    shape = MeshShape(data=2, tensor=2)
    sharding = shard_pair(shape, config, batch_size=ROWS).with_drafter(
        head.layer, shapes_of(eagle_head.init_params, head)
    )
    shardings = state_shardings(step, sharding)
    state = state_shapes(step, shardings)
    for moments in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        query: Any = moments.layer.query
        assert query.sharding.shard_shape(query.shape) == (32, 16)
    target = shapes_of(transformer.init_params, config)
    tokens = jax.ShapeDtypeStruct((ROWS, SLOTS), jnp.int32)
    loss_mask = jax.ShapeDtypeStruct((ROWS, SLOTS), jnp.bool_)
    rows = PackedRows(
        tokens=tokens, segments=tokens, positions=tokens, loss_mask=loss_mask
    )
    compiled: Any = (
        jax.jit(
            train_step,
            static_argnames=("config",),
            out_shardings=(shardings, sharding.everywhere),
        )
        .lower(
            state,
            there(target, sharding.target_shardings(target)),
            there(rows, sharding.row_shardings(rows)),
            None,
            config=step,
        )
        .compile()
    )
    text: str = compiled.as_text()
    # Nor is the most likely token of each part of the vocabulary gathered.
    assert count_collectives(every_line(text)).keys() == {"all-reduce"}
    print("no weight moves in training", shape, flush=True)


def there(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        shardings,
    )


if __name__ == "__main__":
    assert jax.device_count() == 4
    check("mixtral", *mixtral(), MeshShape(tensor=4))
    check("eagle3", *eagle3(), MeshShape(data=2, tensor=2))
    for shape in (MeshShape(tensor=4), MeshShape(data=2, tensor=2)):
        for bits in (None, 8, 4):
            check_experts(shape, bits)
    check_training()
    print("done")
