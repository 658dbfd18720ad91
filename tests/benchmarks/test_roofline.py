"""Predicted costs: counted by hand, and counted by the compiler."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.benchmarks.pair_sizes import draft_sizes
from eagle_jax.benchmarks.peaks import CHIPS, Machine, parse_machine
from eagle_jax.benchmarks.predictions import (
    PAPER_TAU,
    predict_round,
    prediction_table,
    published_sizes,
)
from eagle_jax.benchmarks.roofline import ModelSizes, call_work, token_calls
from eagle_jax.checkpoints.load import target_shapes
from eagle_jax.config import TreeConfig
from eagle_jax.drafting.eagle import Eagle3DrafterParams, Eagle3Head
from eagle_jax.errors import InputError
from eagle_jax.models import cache as kv
from eagle_jax.models import eagle3_head, transformer
from eagle_jax.models.eagle3_head import Eagle3HeadConfig
from eagle_jax.models.joined import join_products
from eagle_jax.models.quantized import GROUP_SIZE
from eagle_jax.testing.traffic import memory_bytes
from tests import tiny

_V5E = parse_machine("v5e-1")
_CONFIG = tiny.target_config(
    **{"hidden_size": 256, "intermediate_size": 384, "num_heads": 4},
    **{"num_kv_heads": 2, "head_dim": 64, "num_layers": 3, "vocab_size": 1000},
)
_KEYS = 2 * 256 * 128
_LAYER = 256 * 256 + _KEYS + 256 * 256 + 3 * 256 * 384


def sizes(dtype: str = "float32") -> ModelSizes:
    weights = jax.eval_shape(
        lambda: transformer.init_params(jax.random.key(0), _CONFIG, "float32")
    )
    table = weights.output_head
    assert table is not None
    return ModelSizes.of(_CONFIG.layer, weights.layers, table, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("chips", [1, 4])
def test_a_call_is_what_is_counted_by_hand(rows: int, chips: int) -> None:
    machine = dataclasses.replace(_V5E, num_chips=chips)
    call = call_work(sizes(), machine, rows=rows, scored=rows, slots=128, batch=2)
    tokens = 2 * rows
    kept = 1 if chips == 1 else 1 / 2  # There are two key/value heads.
    weights = (_LAYER - _KEYS) / chips + _KEYS * kept
    assert call["weights"].flops == 2 * tokens * 3 * weights
    assert call["weights"].read == 4 * 3 * (weights + 2 * 256 / chips)
    assert call["cache"].read == 4 * 3 * 2 * 2 * 128 * 2 * 64 * kept
    assert call["cache"].flops == 2 * 2 * tokens * 3 * 4 * 128 * 64 / chips
    assert call["head"].flops == 2 * tokens * 256 * 1000 / chips
    assert call["head"].read == (4 * 256 * 1000 + 8 * tokens * 1000) / chips
    sums = (2 * 3 + 1) * tokens * 256 * 4
    assert call["collectives"].moved == 2 * sums * (chips - 1) / chips


def test_a_call_is_what_is_compiled() -> None:
    """Of one row in float32 on a CPU, but for what a layer does between products."""
    params = jax.eval_shape(
        lambda: transformer.init_params(jax.random.key(0), _CONFIG, "float32")
    )
    cache = jax.eval_shape(
        lambda: kv.init_cache(
            num_layers=3,
            batch=1,
            num_kv_heads=2,
            capacity=128,
            head_dim=64,
            dtype=jnp.dtype("float32"),
        )
    )

    @jax.jit
    def token(params: Any, cache: Any, tokens: jax.Array) -> jax.Array:
        output = transformer.forward(params, _CONFIG, tokens, tokens, None, cache)
        return transformer.unembed(params.output_head, output.hidden)

    program = token.lower(params, cache, jnp.zeros((1, 1), jnp.int32)).compile()
    (call,) = token_calls(sizes(), _V5E, slots=128)
    flops = sum(work.flops for work in call.values())
    read = sum(work.read for work in call.values())
    counted, text = program.cost_analysis(), program.as_text()
    assert counted is not None and text is not None
    assert counted["flops"] == pytest.approx(flops, rel=0.1)
    assert memory_bytes(text) == pytest.approx(read, rel=0.1)


def test_each_part_takes_the_longer_of_its_two_times() -> None:
    """Few rows wait for the weights, many for the products."""
    chip = _V5E.chip
    for rows in (1, 10_000):
        call = call_work(sizes("bfloat16"), _V5E, rows=rows, scored=1, slots=128)
        work = call["weights"]
        times = work.read / chip.bandwidth, work.flops / chip.flops
        assert work.seconds(_V5E) == max(times)
        assert (times[1] > times[0]) == (rows > 1)


def test_scores_cost_memory_where_a_block_of_them_does_not_fit_the_chip() -> None:
    for rows, slots, is_free in (
        (60, 512, True),
        (60, 2**20, True),  # As many at once as of a block.
        (2**16, 512, False),
    ):
        call = call_work(sizes(), _V5E, rows=rows, scored=1, slots=slots)
        assert (call["scores"].read == 0) == is_free


def test_a_mixture_reads_the_experts_that_tokens_choose() -> None:
    layer = dataclasses.replace(_CONFIG.layer, num_experts=8, experts_per_token=2)
    config = dataclasses.replace(_CONFIG, layer=layer)
    weights = jax.eval_shape(
        lambda: transformer.init_params(jax.random.key(0), config, "float32")
    )
    assert weights.output_head is not None
    mixture = ModelSizes.of(
        layer, weights.layers, weights.output_head, dtype="float8_e4m3fn"
    )
    experts = 3 * 8 * 3 * 256 * 384
    for rows, read in ((1, experts / 4), (1000, experts)):
        call = call_work(mixture, _V5E, rows=rows, scored=1, slots=1)
        others = 3 * (_LAYER - 3 * 256 * 384 + 8 * 256 + 2 * 256)
        assert call["weights"].read == pytest.approx(others + read)
        active = _LAYER + 3 * 256 * 384 + 8 * 256  # Two experts and the router.
        assert call["weights"].flops == pytest.approx(2 * rows * 3 * active)


def test_quantized_weights_are_read_as_integers_and_multiplied_as_they_stand() -> None:
    layers = target_shapes(_CONFIG, 4).layers
    table = jnp.ones((256, 10))
    found = ModelSizes.of(_CONFIG.layer, layers, table, dtype="bfloat16")
    matrices = found.split, found.keys
    assert sum(x.products for x in matrices) == 3 * _LAYER
    scales, norms = 2 * _LAYER / GROUP_SIZE, 2 * 2 * 256
    assert sum(x.bytes for x in matrices) == 3 * (_LAYER / 2 + scales + norms)


def test_what_a_mesh_leaves_whole_is_read_by_every_chip() -> None:
    """The matrix of a head that fuses embedding and feature."""
    _, draft = published_sizes("Llama-3-8B")
    fused = 2 * 4096 * 4096
    assert draft.whole.products == fused
    alone, of_four = (
        call_work(draft, parse_machine(name), rows=1, scored=1, slots=1)["weights"]
        for name in ("v5e-1", "v5e-4")
    )
    assert of_four.read - alone.read / 4 == pytest.approx(1.5 * fused, rel=0.01)
    # It fills half of the vector memory of v5e, and more than that of an H200.
    for name, is_read_again in (("v5e-4", False), ("h200-1", True)):
        first, further = (
            call_work(draft, parse_machine(name), rows=1, scored=1, slots=1, follows=x)
            for x in (False, True)
        )
        saved = first["weights"].read - further["weights"].read
        assert saved == (0 if is_read_again else draft.whole.bytes)


def test_features_are_fused_once_in_a_round_of_eagle3() -> None:
    head = Eagle3HeadConfig(
        layer=_CONFIG.layer,
        feature_size=3 * 256,
        draft_vocab_size=500,
        vocab_size=1000,
        max_positions=64,
    )
    shapes = jax.eval_shape(
        lambda: eagle3_head.init_params(jax.random.key(0), head, "float32")
    )
    params = Eagle3DrafterParams(head=shapes, embedding=jnp.zeros((1000, 256)))
    model = Eagle3Head(config=head, dtype="float32")
    draft = draft_sizes(model, params, dtype="float32")
    first, further = (
        call_work(draft, _V5E, rows=2, scored=1, slots=1, follows=follows)["weights"]
        for follows in (False, True)
    )
    assert first.read - further.read == 4 * 3 * 256 * 256
    assert first.flops - further.flops == 2 * 2 * 3 * 256 * 256


@pytest.mark.parametrize(("tokens", "is_split"), [(8192, True), (8190, False)])
def test_a_draft_that_chips_do_not_divide_is_whole_on_each(
    tokens: int, is_split: bool
) -> None:
    _, draft = published_sizes("Llama-3-8B", tokens)
    alone, of_four = (
        call_work(draft, parse_machine(name), rows=1, scored=1, slots=1)
        for name in ("v5e-1", "v5e-4")
    )
    share = 1 / 4 if is_split else 1
    assert of_four["head"].read == share * alone["head"].read
    assert (of_four["weights"].read < alone["weights"].read) == is_split
    assert (of_four["collectives"].moved > 0) == is_split


def test_tables_that_a_head_borrows_take_memory_once() -> None:
    """Llama-3-8B has 14.96 GiB of weights, its head 0.47 without its tables."""
    target, draft = published_sizes("Llama-3-8B")
    assert target.gib(0, _V5E) == pytest.approx(14.96, abs=0.01)
    assert draft.gib(0, _V5E) == pytest.approx(0.47, abs=0.01)
    _, narrow = published_sizes("Llama-3-8B", 32768)
    columns = 2 * 4096 * 32768 / 2**30
    assert narrow.gib(0, _V5E) - draft.gib(0, _V5E) == pytest.approx(columns)


def test_joined_products_are_counted_as_those_they_join() -> None:
    weights = transformer.init_params(jax.random.key(0), _CONFIG, "float32")
    joined = join_products(weights)
    assert weights.output_head is not None
    one, other = (
        ModelSizes.of(_CONFIG.layer, x.layers, weights.output_head, dtype="bfloat16")
        for x in (weights, joined)
    )
    assert one == other


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("v5e-4", 1 / 2), ("v5e-128", 3 / 4), ("v5e-256", 1)),
        *(("v5p-8", 1 / 3), ("v4-16", 1 / 2), ("v5p-128", 1), ("h200-8", 1)),
    ],
)
def test_a_chip_receives_over_the_links_that_its_slice_has(
    name: str, share: float
) -> None:
    machine = parse_machine(name)
    assert machine.link == pytest.approx(machine.chip.link * share)


@pytest.mark.parametrize(
    "name", ["v7-4", "v5e-3", "v5e-", "v5p-1", "h200-3", "", "tpu"]
)
def test_an_unknown_machine_is_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(InputError, match="known are v4-") as refused:
        parse_machine(name)
    assert all(chip in str(refused.value) for chip in CHIPS)


@pytest.mark.parametrize(
    ("name", "chips"), [("v5e-4", 4), ("V6E-1", 1), ("v5p-8", 4), ("h200", 1)]
)
def test_a_machine_has_the_chips_that_its_maker_counts(name: str, chips: int) -> None:
    assert parse_machine(name).num_chips == chips


def test_every_peak_has_a_source() -> None:
    assert all(chip.source.startswith("https://") for chip in CHIPS.values())
    assert str(Machine(chip=CHIPS["v5p"], num_chips=4)) == "v5p-8"


def test_the_papers_rounds_are_near() -> None:
    """EAGLE-2's own round takes 1.37 tokens at 7B and 1.13 at 13B."""
    tree = TreeConfig(num_nodes=60, depth=6, width=10)
    for model, ratio in (("Llama-2-7B", 1.37), ("Llama-2-13B", 1.13)):
        found = predict_round(
            *published_sizes(model), parse_machine("h200-1"), tree, slots=512
        )
        assert found.ratio == pytest.approx(ratio, rel=0.15)


def test_what_does_not_fit_has_no_figures() -> None:
    tree = TreeConfig(num_nodes=60, depth=6, width=10)
    lines = prediction_table([_V5E], [512], [tree], tokens_per_round=4).splitlines()[2:]
    assert len(lines) == 2 * len(PAPER_TAU)
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    ours = {row[0]: row for row in rows if row[1] == "v5e-1"}
    assert ours["Llama-3-70B"][7] == f"needs {math.ceil(134.0)} GiB"
    assert ours["Llama-3-70B"][-1] == ours["Llama-2-13B"][-1] == "-"
    assert float(ours["Llama-2-7B"][-1]) > 1


def test_what_chips_do_not_divide_has_no_figures() -> None:
    tree = TreeConfig(num_nodes=60, depth=6, width=10)
    table = prediction_table([parse_machine("v5e-16")], [512], [tree])
    (row,) = [x for x in table.splitlines() if "13B" in x and "v5e-16" in x]
    *_, bound, tau, speedup, _ = [cell.strip() for cell in row.split("|")]
    assert (bound, tau, speedup) == ("16 chips do not divide it", "-", "-")
