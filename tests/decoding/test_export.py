"""Programs made on one machine run on another: one source for all platforms."""

from typing import Any

import jax
import numpy as np
from jax import export

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from tests.decoding.test_transformer_loop import NUM_SLOTS, make_pair
from tests.helpers import texts

PLATFORMS = ("cpu", "cuda", "tpu")


def over_machines(program: Any, *inputs: Any) -> Any:
    """Runs what a file holds that any of the platforms could run.

    A file knows arrays and lists of them, but neither our classes nor typed keys.
    """

    def on_lists(leaves: list[jax.Array]) -> Any:
        args = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(program(*args))

    leaves, structure = jax.tree.flatten(inputs)
    exported = export.export(jax.jit(on_lists), platforms=PLATFORMS)(leaves)
    assert exported.platforms == PLATFORMS
    there = export.deserialize(exported.serialize())
    results = jax.tree.structure(jax.eval_shape(program, *inputs))
    return jax.tree.unflatten(results, there.call(leaves))


def test_exported_programs_give_the_same_tokens() -> None:
    target, drafter, params = make_pair()
    requests = make_requests(
        [[3, 1, 4], [1, 5], [2]],
        max_new_tokens=20,
        temperature=[0.0, 1.0, 1.0],
        seeds=[1, 2, 3],
    )

    decoder = Decoder(target=target, drafter=drafter)

    def prefill(*inputs: Any) -> Any:
        return speculative.prefill(decoder, *inputs, num_slots=NUM_SLOTS)

    def decode(*inputs: Any) -> Any:
        return speculative.decode(decoder, *inputs)

    started = over_machines(prefill, params, requests)
    found = over_machines(decode, params, started)
    expected = decode(params, prefill(params, requests))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert texts(requests, found) == texts(requests, expected)
    assert (expected.num_rounds > 1).all(), "nothing would be shown"
