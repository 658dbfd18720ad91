"""What a process with eight devices runs for `test_mesh_decoding`.

python -m tests.parallel.on_eight_devices TINY_PAIR OUTPUT_FOLDER
"""

import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.logprobs import LogprobsConfig
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.eagle import EagleHead, EagleLoss
from eagle_jax.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle_jax.heads.rows import PackedRows
from eagle_jax.interface import Params
from eagle_jax.models import transformer
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.mlp import feed_forward, init_mlp
from eagle_jax.models.quantized import quantize_layers
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import (
    MeshShape,
    PairSharding,
    make_mesh,
    param_shardings,
    shard_pair,
    split_rules,
)
from eagle_jax.processors import ProcessorConfig
from eagle_jax.sampling import choose_tokens
from eagle_jax.testing.programs import (
    count_collectives,
    every_line,
    find_copies,
    loop_lines,
)
from eagle_jax.training.config import OptimizerConfig
from eagle_jax.training.step import (
    StepConfig,
    read_target,
    state_shapes,
    train_step,
)
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
PROCESSED = make_requests(
    [[row + 1] * (row % 4 + 1) for row in range(ROWS)],
    max_new_tokens=16,
    temperature=[0.0, 1.0] * (ROWS // 2),
    seeds=list(range(ROWS)),
    stop_tokens=[4],
    processors=[
        ProcessorConfig(repetition_penalty=1.5, no_repeat_ngram_size=2),
        ProcessorConfig(frequency_penalty=0.5, bad_words=[[3], [1, 2]]),
        ProcessorConfig(presence_penalty=0.5, logit_bias={4: 3.0}, min_new_tokens=8),
        ProcessorConfig(),
    ]
    * (ROWS // 4),
)
SMALL: dict[str, Any] = {"vocab_size": 32, "max_positions": SLOTS}


def pair_of(num_kv_heads: int, **target: Any) -> Pair:
    sizes = {"num_heads": HEADS, "num_kv_heads": num_kv_heads, "head_dim": HEAD_WIDTH}
    sizes |= {"vocab_size": VOCABULARY, "max_positions": SLOTS}
    config = tiny.target_config(**sizes, **target)
    return tiny.pair(config, tiny.head_config(**sizes), TREE)


def eagle3() -> Pair:
    config = tiny.target_config(num_layers=3, feature_layers=(0, 1, 2), **SMALL)
    head = Eagle3HeadConfig(
        draft_vocab_size=16,
        feature_size=config.feature_size,
        has_feature_norms=True,
        recycles_normed=True,
        **tiny.sizes(**SMALL),
    )
    target = tiny.target_params(config)
    params = Eagle3Head(config=head).init(jax.random.key(1))
    return Pair(
        Transformer(config=config),
        TreeDrafter(model=Eagle3Head(config=head), tree=TREE),
        Params(target=target, drafter=Eagle3Head.join(params, target)),
    )


def decode(
    pair: Pair,
    sharding: PairSharding | None,
    requests: Requests,
    logprobs: LogprobsConfig | None,
) -> list[np.ndarray]:
    """Tokens, how many drafts were accepted in each round, and log-probabilities."""
    target, drafter, params = pair
    decoder = Decoder(target=target, drafter=drafter, logprobs=logprobs)
    prefill: Any = functools.partial(speculative.prefill, decoder, num_slots=SLOTS)
    rounds: Any = functools.partial(speculative.decode, decoder)
    if sharding is None:
        return found_in(rounds(params, prefill(params, requests)))
    state = sharding.shard(prefill)(params, sharding.put_rows(requests))
    check_state(state, sharding, target.config.layer)
    sharded: Any = sharding.shard(rounds, donates_state=True)
    program = sharded.lower(params, state).compile()
    if target.config.vocab_size == VOCABULARY:
        check_program(program.as_text(), sharding, target)
    state = program(params, state)
    check_state(state, sharding, target.config.layer)
    return found_in(state)


def found_in(state: Any) -> list[np.ndarray]:
    found = state.tokens, state.accept_lengths, state.logprobs
    return [*map(np.asarray, jax.tree.leaves(found))]


def decode_plainly(pair: Pair, sharding: PairSharding) -> np.ndarray:
    """Tokens without drafts."""
    decoder = Decoder(target=pair.target)
    prefill: Any = functools.partial(speculative.prefill, decoder, num_slots=SLOTS)
    tokens: Any = functools.partial(speculative.decode, decoder)
    requests = sharding.put_rows(REQUESTS)
    state = sharding.shard(prefill)(pair.params, requests)
    state = sharding.shard(tokens, donates_state=True)(pair.params, state)
    return np.asarray(state.tokens)


def held(array: jax.Array) -> tuple[int, ...]:
    """What one device really holds."""
    (shape,) = {shard.data.shape for shard in array.addressable_shards}
    return shape


def check_params(params: Params, shape: MeshShape, config: TransformerConfig) -> None:
    layer, parts = config.layer, shape.tensor
    heads = layer.num_heads * layer.head_dim // parts
    kv_heads = max(layer.num_kv_heads // parts, 1) * layer.head_dim
    head = params.drafter.head.layer
    for weights in (*params.target.layers, head):
        rows = held(weights.query)[0]  # An EAGLE-3 head's are twice as many.
        assert held(weights.query) == (rows, heads)
        assert held(weights.key) == held(weights.value) == (rows, kv_heads)
        assert held(weights.output) == (heads, WIDTH)
        if experts := getattr(weights.mlp, "experts", None):  # They are narrow.
            assert held(experts.gate) == held(experts.up) == (1, WIDTH, 48)
            assert held(experts.down) == (1, 48, WIDTH)
        else:
            assert (
                held(weights.mlp.gate) == held(weights.mlp.up) == (WIDTH, 48 // parts)
            )
            assert held(weights.mlp.down) == (48 // parts, WIDTH)
        assert held(weights.mlp_norm) == (WIDTH,)
    for table in (params.target, params.drafter):
        assert held(table.embedding) == (config.vocab_size // parts, WIDTH)
    assert held(params.target.output_head) == (WIDTH, config.vocab_size // parts)
    assert len(params.target.norm.addressable_shards) == shape.num_devices


def check_state(state: Any, sharding: PairSharding, layer: LayerConfig) -> None:
    data = sharding.mesh.shape["data"]
    tensor = sharding.mesh.size // data
    kv_heads = max(layer.num_kv_heads // tensor, 1)
    wanted = (ROWS // data, kv_heads, SLOTS, layer.head_dim)
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
    name: str,
    pair: Pair,
    *meshes: tuple[int, int],
    requests: Requests = REQUESTS,
    logprobs: LogprobsConfig | None = None,
) -> None:
    """Every mesh gives the tokens of one device, and no device has more than a part."""
    target, drafter, params = pair
    layer = target.config.layer
    expected = decode(pair, None, requests, logprobs)
    assert expected[1].sum() > 0, "drafts are accepted"
    for data, tensor in meshes:
        shape = MeshShape(data=data, tensor=tensor)
        devices = jax.devices()[: shape.num_devices]
        sharding = shard_pair(shape, target.config, batch_size=ROWS, devices=devices)
        sharding = sharding.with_drafter(layer, params.drafter)
        shardings = Params(
            target=sharding.target_shardings(params.target),
            drafter=sharding.drafter_shardings(params.drafter),
        )
        there = Pair(target, drafter, jax.device_put(params, shardings))
        check_params(there.params, shape, target.config)
        found = decode(there, sharding, requests, logprobs)
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-4)
        if layer.num_kv_heads == HEADS and data < ROWS < ROWS * tensor:
            plain = decode_plainly(there, sharding)
            np.testing.assert_array_equal(plain, expected[0])
        if (data, tensor) == (2, 4):
            check_ties(sharding)
        print("equal", name, shape, flush=True)


def check_experts(shape: MeshShape, bits: int | None, size: int, rows: int) -> None:
    """A mixture's outputs are one device's, and summed over devices once."""
    layer = dataclasses.replace(
        tiny.LAYER, num_experts=16, experts_per_token=2, expert_size=size
    )
    key, sizes = jax.random.key(0), (layer.hidden_size, size)
    mlp = init_mlp(key, *sizes, jnp.float32, num_experts=16, has_bias=True)
    mlp = jax.tree.map(lambda x: x + 0.01, mlp)  # Biases are zero.
    if bits:
        mlp = quantize_layers(mlp, bits)
    mesh = make_mesh(shape, 1, jax.devices()[:4])
    x = jax.random.normal(jax.random.key(1), (2, rows, layer.hidden_size))
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
    experts: Any = there.experts
    parts = jax.tree.leaves(experts)[0].sharding.spec
    assert (parts[0] is not None) == (size == 384), "narrow experts stay whole"
    np.testing.assert_allclose(split(there, x), run(mlp, x), atol=1e-5)
    compiled: Any = split.lower(there, x).compile()
    lines = every_line(compiled.as_text())
    assert not any(" conditional(" in line for line in lines)
    assert count_collectives(lines) == {"all-reduce": 1}


def check_training() -> None:
    """A training step moves sums, and no weight; nor does reading the target."""
    experts = {"num_experts": 4, "experts_per_token": 2}
    config = tiny.target_config(num_layers=1, num_kv_heads=4, **experts, **SMALL)
    head = EagleHead(config=tiny.head_config(num_kv_heads=4, **SMALL))
    step = StepConfig(
        target=Transformer(config=config),
        head=head,
        loss=EagleLoss(),
        optimizer=OptimizerConfig(),
        steps=4,
    )
    shape = MeshShape(data=2, tensor=2)
    devices = jax.devices()[:4]
    sharding = shard_pair(shape, config, batch_size=ROWS, devices=devices)
    sharding = sharding.with_drafter(head.config.layer, shapes_of(head.init))
    state = state_shapes(step, sharding)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    for moments in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        query: Any = moments.layer.query
        assert query.sharding.shard_shape(query.shape) == (32, 16)
    target = shapes_of(transformer.init_params, config)
    tokens = jax.ShapeDtypeStruct((ROWS, SLOTS), jnp.int32)
    loss_mask = jax.ShapeDtypeStruct((ROWS, SLOTS), jnp.bool_)
    rows = PackedRows(
        tokens=tokens, segments=tokens, positions=tokens, loss_mask=loss_mask
    )
    target = there(target, sharding.target_shardings(target))
    rows = there(rows, sharding.row_shardings(rows))
    read: Any = sharding.shard(functools.partial(read_target, step))
    features = jax.eval_shape(read, target, rows)
    features = there(features, sharding.row_shardings(features))
    take_step: Any = jax.jit(
        functools.partial(train_step, config=step),
        out_shardings=(shardings, sharding.everywhere),
    )
    # Nor is the most likely token of each part of the vocabulary gathered.
    for traced in (
        read.lower(target, rows),
        take_step.lower(state, target, rows, features),
    ):
        text: str = traced.compile().as_text()
        assert count_collectives(every_line(text)).keys() == {"all-reduce"}
    print("no weight moves in training", shape, flush=True)


def there(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        shardings,
    )


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


if __name__ == "__main__":
    assert jax.device_count() == 8
    check_decoding("llama", pair_of(HEADS), (2, 4))
    # Fewer key/value heads than devices: some hold the same.
    experts = tiny.GPT_OSS | {"num_experts": 8}
    check_decoding("gpt-oss", pair_of(2, **experts), (1, 8))
    config = LogprobsConfig(num_top=3, prompt=True)
    check_decoding(
        "eagle3, processors", eagle3(), (2, 2), requests=PROCESSED, logprobs=config
    )
    # Of 4 bits, devices need pairs of groups. Many rows are cut into tiles.
    for shape, bits in ((MeshShape(tensor=4), 4), (MeshShape(data=2, tensor=2), None)):
        for size in (512, 384):
            check_experts(shape, bits, size, 1 if bits else 260)
    check_training()
    check_command(Path(sys.argv[1]), Path(sys.argv[2]))
    print("done")
