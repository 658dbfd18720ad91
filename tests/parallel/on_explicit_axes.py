"""What a process with four devices runs for `test_mesh_decoding`.

python -m tests.parallel.on_explicit_axes
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.interface import Params
from eagle_jax.models.cache import append_rows
from eagle_jax.parallel import PairSharding, split_rules
from eagle_jax.tree import chain
from tests import tiny
from tests.helpers import texts

PAIR = tiny.pair(tiny.TARGET, tiny.HEAD, chain(2))
DECODER = Decoder(target=PAIR.target, drafter=PAIR.drafter)
REQUESTS = make_requests(
    [[1, 2, 3], [4], [5, 6], [2, 2]],
    max_new_tokens=9,
    temperature=[1.0, 0.0, 1.0, 1.0],
    seeds=range(4),
)


def run(params: Params, requests: object) -> DecodeState:
    state = speculative.prefill(DECODER, params, requests, num_slots=64)
    return speculative.decode(DECODER, params, state)


def decode(mesh: Mesh) -> list[list[int]]:
    rules = split_rules(mesh, tiny.TARGET.layer)
    sharding = PairSharding(mesh=mesh, target=rules)
    sharding = sharding.with_drafter(tiny.HEAD.layer, PAIR.params.drafter)
    target, drafter = PAIR.params.target, PAIR.params.drafter
    params = Params(
        target=jax.device_put(target, sharding.target_shardings(target)),
        drafter=jax.device_put(drafter, sharding.drafter_shardings(drafter)),
    )
    state = sharding.shard(run)(params, sharding.put_rows(REQUESTS))
    return texts(REQUESTS, sharding.fetch(state))


def check_rows(mesh: Mesh) -> None:
    """Rows of a cache are written where they lie, whichever axis is split."""
    slots, lengths = jnp.zeros((4, 2, 8, 3)), jnp.array([0, 2, 4, 6], jnp.int32)
    write = jax.jit(functools.partial(append_rows, axis=2))
    expected = write(slots, slots[:, :, :2] + 1, lengths)
    for axes in [("data",), (None, "kv"), ("data", "kv")]:
        by_head = NamedSharding(mesh, PartitionSpec(*axes))
        by_row = NamedSharding(mesh, PartitionSpec(axes[0]))
        cache = jax.device_put(slots, by_head)
        rows = jax.device_put(slots[:, :, :2] + 1, by_head)
        found = write(cache, rows, jax.device_put(lengths, by_row))
        np.testing.assert_array_equal(jax.device_get(found), expected)


if __name__ == "__main__":
    wanted = texts(REQUESTS, run(PAIR.params, REQUESTS))
    for kind in (AxisType.Auto, AxisType.Explicit):
        names = ("data", "kv", "query")
        mesh = jax.make_mesh((2, 2, 1), names, axis_types=(kind,) * 3)
        check_rows(mesh)
        print(f"equal rows of a cache {kind.name}")
        assert decode(mesh) == wanted
        print(f"equal texts {kind.name}")
        with jax.set_mesh(mesh):
            assert decode(mesh) == wanted
        print(f"equal texts within the mesh {kind.name}")
    print("done")
