"""What a process with two devices runs for `test_mesh_decoding`.

python -m tests.parallel.quantized_on_two_devices TINY_PAIR OUTPUT_FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.checkpoints import convert_pair, load_target
from eagle_jax.decoding import autoregressive
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.generation.placement import target_shardings
from eagle_jax.interface import Params
from eagle_jax.models.linear import at_once, linear
from eagle_jax.models.transformer import Transformer
from eagle_jax.parallel import MeshShape, shard_pair

# Of one device, for a matrix split over its outputs and one over its inputs.
HELD = {
    8: {"gate": ((32, 24), (1, 24)), "down": ((24, 32), (1, 32))},
    4: {"gate": ((16, 24), (2, 24)), "down": ((12, 32), (1, 32))},
}


def check(folder: Path, store: Path, bits: int) -> None:
    config, params = load_target(folder, bits=bits)
    sharding = shard_pair(MeshShape(tensor=2), config, batch_size=1)
    shardings = target_shardings(sharding, config, bits)
    there = load_target(folder, "float32", shardings, bits)[1]
    again = load_target(store, "float32", shardings)[1]
    jax.tree.map(np.testing.assert_array_equal, there, params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    for name, expected in HELD[bits].items():
        for loaded in (there, again):
            weight = getattr(loaded.layers[1].mlp, name)
            parts = weight.values.addressable_shards[0], weight.scales
            parts = parts[0].data.shape, parts[1].addressable_shards[0].data.shape
            assert parts == expected, (name, parts)
    check_products(params, there)

    target = Transformer(config=config)
    requests = make_requests([[298, 5, 9]], max_new_tokens=12)

    def decode(params: Any) -> np.ndarray:
        state = autoregressive.generate(
            Decoder(target=target, acceptance="greedy"), Params(target=params), requests
        )
        return np.asarray(state.tokens)

    np.testing.assert_array_equal(decode(there), decode(params))
    print("equal", bits, flush=True)


def check_products(params: Any, there: Any) -> None:
    """Both forms of the product, of what is split over outputs and over inputs."""
    for name, size in (("gate", 32), ("down", 48)):
        x = jax.random.normal(jax.random.key(0), (3, size))
        whole = getattr(params.layers[0].mlp, name)
        split = getattr(there.layers[0].mlp, name)
        for product in (linear, at_once):
            np.testing.assert_allclose(
                jax.jit(product)(x, split), jax.jit(product)(x, whole), atol=1e-5
            )


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    assert jax.device_count() == 2
    pair, output = Path(sys.argv[1]), Path(sys.argv[2])
    for bits in (8, 4):
        convert_pair(output / str(bits), pair / "target", bits=bits)
        check(pair / "target", output / str(bits) / "target", bits)
    print("done")
