"""What a process with eight devices runs for `test_mesh_decoding`.

python -m tests.parallel.on_eight_devices TINY_PAIR OUTPUT_FOLDER
"""

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer
from eagle_jax.parallel import MeshShape, PairSharding, shard_pair
from eagle_jax.sampling import choose_tokens
from eagle_jax.testing.programs import count_collectives, find_copies, loop_lines
from eagle_jax.tree import top_children
from tests import tiny
from tests.conftest import load_main
from tests.tiny import Pair

ROWS, SLOTS, VOCABULARY, WIDTH, HEADS, HEAD_WIDTH = 8, 64, 80, 32, 8, 8
TREE = TreeConfig(num_nodes=6, depth=2, width=2)
REQUESTS = make_requests(
    [[row + 1] * (row % 4 + 1) for row in range(ROWS)],
    max_new_tokens=[16 - row % 3 for row in range(ROWS)],
    temperature=[0.0, 1.0] * (ROWS // 2),
    top_k=[0, 0, 0, 5] * (ROWS // 4),
    seeds=list(range(ROWS)),
)
COLD = dataclasses.replace(REQUESTS.sampling, temperature=jnp.zeros(ROWS))
GREEDY = dataclasses.replace(REQUESTS, sampling=COLD)


def make_pair(num_kv_heads: int) -> Pair:
    sizes = {"num_heads": HEADS, "num_kv_heads": num_kv_heads, "head_dim": HEAD_WIDTH}
    sizes |= {"vocab_size": VOCABULARY, "max_positions": SLOTS}
    return tiny.pair(tiny.target_config(**sizes), tiny.head_config(**sizes), TREE)


def decode(
    pair: Pair, requests: Requests, sharding: PairSharding | None
) -> list[np.ndarray]:
    """Tokens, and how many drafts were accepted in each round."""
    target, drafter, params = pair
    rule = "coupled" if requests.sampling.temperature.any() else "greedy"
    decoder = Decoder(target=target, drafter=drafter, acceptance=rule)
    prefill: Any = functools.partial(speculative.prefill, decoder, num_slots=SLOTS)
    rounds: Any = functools.partial(speculative.decode, decoder)
    if sharding is None:
        state = rounds(params, prefill(params, requests))
        return [np.asarray(state.tokens), np.asarray(state.accept_lengths)]
    requests = sharding.put_rows(requests)
    state = sharding.shard(prefill)(params, requests)
    check_state(state, sharding, target.config.layer.num_kv_heads)
    sharded: Any = sharding.shard(rounds, donates_state=True)
    program = sharded.lower(params, state).compile()
    check_program(program.as_text(), sharding, target)
    state = program(params, state)
    check_state(state, sharding, target.config.layer.num_kv_heads)
    return [np.asarray(state.tokens), np.asarray(state.accept_lengths)]


def decode_plainly(
    pair: Pair, requests: Requests, sharding: PairSharding | None
) -> np.ndarray:
    """Tokens without drafts."""
    target, _, params = pair
    decoder = Decoder(target=target)
    prefill: Any = functools.partial(autoregressive.prefill, decoder, num_slots=SLOTS)
    tokens: Any = functools.partial(autoregressive.decode, decoder)
    if sharding is not None:
        requests = sharding.put_rows(requests)
        prefill = sharding.shard(prefill)
        tokens = sharding.shard(tokens, donates_state=True)
    state = tokens(params, prefill(params, requests))
    return np.asarray(state.tokens)


def held(array: jax.Array) -> tuple[int, ...]:
    """What one device really holds."""
    (shape,) = {shard.data.shape for shard in array.addressable_shards}
    return shape


def check_params(params: Params, data: int, tensor: int, num_kv_heads: int) -> None:
    heads = HEADS * HEAD_WIDTH // tensor
    kv_heads = max(num_kv_heads // tensor, 1) * HEAD_WIDTH
    head = params.drafter.head
    for layer in (*params.target.layers, head.layer):
        assert held(layer.query) == (WIDTH, heads)
        assert held(layer.key) == held(layer.value) == (WIDTH, kv_heads)
        assert held(layer.output) == (heads, WIDTH)
        assert held(layer.mlp.gate) == held(layer.mlp.up) == (WIDTH, 48 // tensor)
        assert held(layer.mlp.down) == (48 // tensor, WIDTH)
        assert held(layer.mlp_norm) == (WIDTH,)
    for table in (params.target, params.drafter):
        assert held(table.embedding) == (VOCABULARY // tensor, WIDTH)
        assert held(table.output_head) == (WIDTH, VOCABULARY // tensor)
    assert len(params.target.norm.addressable_shards) == data * tensor


def check_state(state: Any, sharding: PairSharding, num_kv_heads: int) -> None:
    data = sharding.mesh.shape["data"]
    tensor = sharding.mesh.size // data
    wanted = (ROWS // data, max(num_kv_heads // tensor, 1), SLOTS, HEAD_WIDTH)
    caches = (state.target_cache, state.drafter_state.cache)
    for cached in (layer for cache in caches for layer in cache.layers):
        assert held(cached.keys) == held(cached.values) == wanted
    assert held(state.tokens) == (ROWS // data, SLOTS)


def check_program(text: str, sharding: PairSharding, target: Transformer) -> None:
    """Nothing large moves: two sums per layer and call, one per embedding."""
    data = sharding.mesh.shape["data"]
    tensor = sharding.mesh.size // data
    lines = loop_lines(text)
    rows, kv_heads = ROWS // data, target.config.layer.num_kv_heads
    if kv_heads > tensor:  # With a single one XLA:CPU copies, on one device too.
        cache = (rows, kv_heads // tensor, SLOTS, HEAD_WIDTH)
        assert not find_copies(lines, cache), find_copies(lines, cache)
    found = count_collectives(lines)
    if tensor == 1:
        assert not found, found
        return
    calls = TREE.depth  # Of the head; the target is called once.
    sums = 2 * (target.config.num_layers + calls) + calls + 1
    assert found.keys() <= {"all-reduce", "all-gather"}, found
    # What is left is per level, not per layer, and a number per node: a sum, and
    # what filters ask of a level's drafts and of the target.
    assert sums <= found["all-reduce"] <= sums + calls + 5 * (calls + 1), found
    # The argmax of a draw stands there twice: with filters, and without.
    assert found["all-gather"] <= calls + 4, found
    # Each device makes the noise of its own tokens.
    noise = f"[{rows},{TREE.depth + 1},{VOCABULARY}]"
    assert not any(noise in line for line in lines)
    # No whole cache and no weight: at most the logits of one level of a tree.
    most = rows * TREE.width * VOCABULARY
    gathered = [
        (math.prod(map(int, shape.split(","))), line)
        for line in lines
        for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", line)
    ]
    assert len(gathered) == found["all-gather"]
    assert max(gathered)[0] <= most, max(gathered)


def check_ties(sharding: PairSharding) -> None:
    """Equal logits on both sides of a border: the lower token, as on one device."""
    border = VOCABULARY // 4
    tied = [[border - 1, border], [3, 2 * border, 79], [border, 2 * border], [78, 79]]
    tied += [[0, 79], [2 * border - 1, 2 * border], list(range(80)), [40, 41, 60]]
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    for row, tokens in enumerate(tied):
        logits[row, tokens] = 2.0

    @jax.jit
    def choose(requests: Requests, logits: jax.Array) -> Any:
        settings = (requests.sampling, requests.keys, logits, requests.prompt_lengths)
        return (
            choose_tokens(*settings, greedy=True),
            choose_tokens(*settings, greedy=False),
            jax.lax.top_k(logits, 2)[1],
            top_children(logits, 2)[0],
        )

    split = NamedSharding(sharding.mesh, PartitionSpec("data", ("kv", "query")))
    there = jax.device_put(logits, split)
    assert held(there) == (4, border)
    found = jax.tree.map(np.asarray, choose(sharding.put_rows(REQUESTS), there))
    expected = choose(REQUESTS, jnp.asarray(logits))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(found[0], [tokens[0] for tokens in tied])
    for ranked in found[2:]:
        np.testing.assert_array_equal(ranked, [tokens[:2] for tokens in tied])
    assert (found[1][1::2] != found[0][1::2]).any(), "some tokens were drawn"


def check_decoding(
    num_kv_heads: int, meshes: Sequence[tuple[int, int]], requests: Requests
) -> None:
    pair = target, drafter, params = make_pair(num_kv_heads)
    expected = decode(pair, requests, None)
    assert expected[1].sum() > 0, "drafts are accepted"
    for data, tensor in meshes:
        sharding = shard_pair(
            MeshShape(data=data, tensor=tensor),
            target.config,
            batch_size=ROWS,
            devices=jax.devices()[: data * tensor],
        ).with_drafter(target.config.layer, params.drafter)
        shardings = Params(
            target=sharding.target_shardings(params.target),
            drafter=sharding.drafter_shardings(params.drafter),
        )
        there = Pair(target, drafter, jax.device_put(params, shardings))
        check_params(there.params, data, tensor, num_kv_heads)
        found = decode(there, requests, sharding)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        if num_kv_heads == HEADS and data < ROWS < ROWS * tensor:
            plain = decode_plainly(there, requests, sharding)
            np.testing.assert_array_equal(plain, expected[0])
        if data == 2:
            check_ties(sharding)
        print("equal", num_kv_heads, data, tensor, flush=True)


def check_command(pair: Path, folder: Path) -> None:
    """The command with a mesh says what it says without, in a queue and in batches."""
    main = load_main("generate")
    flags = ["--target", f"{pair}/target", "--draft", f"{pair}/head", "--batch-size"]
    flags += ["2", "--num-nodes", "3", "--depth", "1", "--width", "2"]
    flags += ["--prompt", "the", "--prompt", "ten", "--prompt", "on"]
    flags += ["--max-new-tokens", "12", "--temperature", "0.8"]
    results = []
    mesh = ["--mesh", "data=2,tensor=4"]
    for extra in ([], mesh, [*mesh, "--trace"]):
        file = folder / f"{len(results)}.json"
        assert main([*flags, *extra, "--json", str(file)]) == 0
        results.append(json.loads(file.read_text()))
    plain, queued, watched = results
    for run in watched["runs"]:
        del run["trees"]
    assert plain["runs"] == queued["runs"] == watched["runs"]
    assert queued["settings"]["mesh"] == "data=2,tensor=4"
    for mesh, named in (
        ("tensor=4", "there are 8"),
        ("data=4,tensor=2", "does not divide the batch of 2"),
        ("tensor=8", "4 query heads"),
    ):
        file = folder / "refused.json"
        assert main([*flags, "--mesh", mesh, "--json", str(file)]) == 2, named
        assert not file.exists()


if __name__ == "__main__":
    assert jax.device_count() == 8
    check_decoding(HEADS, [(1, 1), (1, 8), (2, 4), (8, 1)], REQUESTS)
    # Fewer key/value heads than devices: some hold the same.
    check_decoding(2, [(1, 8)], REQUESTS)
    check_command(Path(sys.argv[1]), Path(sys.argv[2]))
    print("done")
