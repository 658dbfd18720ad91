"""The loop with a real, random transformer and head, here and on other platforms."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.models import attention
from eagle_jax.models.rope import RopeConfig
from eagle_jax.testing import assert_same_tokens
from tests import tiny
from tests.helpers import on_platform, texts

# Another head width and other key/value heads than the target's: nothing is derived.
HEAD = tiny.head_config(num_kv_heads=4, rope=RopeConfig(theta=500.0))
TREE = TreeConfig(num_nodes=12, depth=3, width=4)
NUM_SLOTS = 128


def make_pair(dtype: str = "float32", **tree: Any) -> tiny.Pair:
    return tiny.pair(tiny.TARGET, HEAD, dataclasses.replace(TREE, **tree), dtype)


def run_rows(
    prompts: list[list[int]], seeds: list[int], limits: list[int], bucket: int = 16
) -> list[list[int]]:
    target, drafter, params = make_pair()
    requests = make_requests(
        prompts,
        max_new_tokens=limits,
        temperature=1.0,
        seeds=seeds,
        prompt_bucket=bucket,
    )
    state = speculative.generate(
        Decoder(target=target, drafter=drafter, acceptance="coupled"),
        params,
        requests,
        num_slots=NUM_SLOTS,
    )
    return texts(requests, state)


def test_a_rows_text_depends_on_the_row_alone() -> None:
    prompt, seed, limit, long = [3, 1, 4], 7, 25, [5, 6, 7, 0, 1, 2, 3, 4, 5]
    (alone,) = run_rows([prompt], [seed], [limit])
    in_batch = run_rows([[1], prompt, long], [0, seed, 1], [25, limit, 25])
    beside_finished = run_rows([[1], prompt, long], [0, seed, 1], [1, limit, 1])
    reordered = run_rows([long, [1], prompt], [1, 0, seed], [25, 25, limit])
    more_padding = run_rows([prompt], [seed], [limit], bucket=64)
    assert_same_tokens(
        [in_batch[1], beside_finished[1], reordered[2], more_padding[0]], [alone] * 4
    )
    assert len(set(alone)) > 5  # A text that varies, so that equality says something.


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [("float16", "greedy"), ("bfloat16", "rejection")],
)
def test_half_precision_text_is_near_the_argmax(
    dtype: str, rule: speculative.AcceptanceRule
) -> None:
    target, drafter, params = make_pair(dtype)
    temperature = 0.0 if rule == "greedy" else 1.0
    requests = make_requests(
        [[1, 2, 3], [4]], max_new_tokens=24, temperature=temperature, seeds=[0, 1]
    )
    state = speculative.generate(
        Decoder(target=target, drafter=drafter, acceptance=rule), params, requests
    )
    assert state.target_cache.layers[0].keys.dtype == jnp.dtype(dtype)
    if rule == "rejection":
        return  # Nothing to compare a draw with; that it runs is the claim.
    # Teacher-force the text: each token is the argmax, or a near tie with it.

    @jax.jit
    def read(weights: Any, tokens: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        nothing = target.init_cache(len(tokens), 0)
        output = target.forward(weights, tokens, places, None, nothing)
        return target.unembed(weights, output.hidden)

    read_logits = np.asarray(read(params.target, state.tokens), np.float32)
    for row, length in enumerate(state.lengths.tolist()):
        begin = int(requests.prompt_lengths[row])
        logits = read_logits[row, begin - 1 : length - 1]
        tokens = np.asarray(state.tokens)[row, begin:length, None]
        chosen = np.take_along_axis(logits, tokens, axis=1)[:, 0]
        assert (logits.max(axis=1) - chosen).max() < 0.1


# What GPUs run instead of loops that end early, run on a CPU.
GPU_SLOTS, BLOCK = 64, 24  # The last block reaches back into the one before.
SIZES: dict[str, Any] = {"vocab_size": 40, "max_positions": GPU_SLOTS}
FILTERED = {
    "top_p": [1.0, 0.9, 1.0, 0.5],
    "top_k": [0, 0, 6, 3],
    "min_p": [0.0, 0.2, 0.0, 0.1],
}


@pytest.mark.parametrize("filters", [{}, FILTERED], ids=["none", "of some rows"])
def test_texts_are_those_of_other_platforms(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several blocks of a cache."""
    for name in ("BLOCK", "CPU_BLOCK"):
        monkeypatch.setattr(attention, name, BLOCK)
    pair = tiny.pair(tiny.target_config(**SIZES), tiny.head_config(**SIZES), TREE)
    requests = make_requests(
        [[1, 2], [3], [4, 5, 6], list(range(20))],
        max_new_tokens=[40, 20, 30, 40],
        temperature=[0.0, 0.7, 1.0, 1.5],
        seeds=range(4),
        prompt_bucket=20,
        **filters,
    )
    decoder = Decoder(target=pair.target, drafter=pair.drafter, acceptance="coupled")
    call = (decoder, pair.params, requests)
    expected = speculative.generate(*call, num_slots=GPU_SLOTS)
    jax.clear_caches()
    with on_platform("cuda"):
        found = speculative.generate(*call, num_slots=GPU_SLOTS)
    jax.clear_caches()
    assert expected.accept_lengths.sum() > 0, "drafts are accepted"
    for name in ("tokens", "lengths", "accept_lengths"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


# Programs made on one machine run on another: one source for all platforms.
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
