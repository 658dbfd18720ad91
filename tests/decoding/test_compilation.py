"""One trace per shape, one copy of the caches, nothing but tokens off the device."""

import collections
import re
from typing import Any

import chex
import jax
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.requests import make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import EagleHead, TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from tests.helpers import SMALL_LAYER

CONFIG = TransformerConfig(
    layer=SMALL_LAYER, num_layers=2, vocab_size=320, max_positions=512
)
HEAD = EagleHeadConfig(layer=SMALL_LAYER, vocab_size=320, max_positions=512)
TARGET = Transformer(config=CONFIG)
DRAFTER = TreeDrafter(
    model=EagleHead(config=HEAD), tree=TreeConfig(num_nodes=12, depth=3, width=4)
)
NUM_SLOTS = 192  # A size that no weight has.
BATCH = 2
CACHE_SHAPE = (
    f"f32[{BATCH},{SMALL_LAYER.num_kv_heads},{NUM_SLOTS},{SMALL_LAYER.head_dim}]"
)


@pytest.fixture(scope="module")
def params() -> Params:
    target = transformer.init_params(jax.random.key(0), CONFIG)
    head = eagle_head.init_params(jax.random.key(1), HEAD)
    return Params(target=target, drafter=EagleHead.params(head, target))


@pytest.fixture(scope="module")
def compilations() -> list[str]:
    """Grows with every program that XLA compiles."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return events


def requests_like(variant: int) -> Any:
    return make_requests(
        [[1 + variant] * (3 + variant), [7]],
        max_new_tokens=[4 + 3 * variant, 9 - variant],
        max_length=40 + variant,
        temperature=0.5 + variant,
        top_p=1.0 - 0.2 * variant,
        top_k=4 * variant,
        seeds=[variant, 10 + variant],
        stop_tokens=[variant] * variant,
    )


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_other_values_compile_nothing(
    params: Params, compilations: list[str], rule: speculative.AcceptanceRule
) -> None:
    def run(variant: int) -> None:
        requests = requests_like(variant)
        state = speculative.generate(
            TARGET, DRAFTER, params, requests, acceptance=rule, num_slots=NUM_SLOTS
        )
        plain = autoregressive.generate(
            TARGET, params.target, requests, greedy=rule == "greedy"
        )
        jax.block_until_ready((state, plain))

    run(0)
    compilations.clear()
    run(1)
    assert compilations == []
    jax.jit(lambda x: x + 12345)(1)  # The listener does listen.
    assert compilations != []


def test_generation_is_traced_once(params: Params) -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params: Params, requests: Any) -> DecodeState:
        return speculative.generate(
            TARGET, DRAFTER, params, requests, acceptance="coupled", num_slots=NUM_SLOTS
        )

    for variant in range(3):
        run(params, requests_like(variant))


def compiled_programs(params: Params) -> dict[str, Any]:
    requests = requests_like(0)
    state = speculative.prefill(
        TARGET, DRAFTER, params, requests, num_slots=NUM_SLOTS, acceptance="greedy"
    )
    pair = (TARGET, DRAFTER, params, requests, state)
    plain = autoregressive.prefill(
        TARGET, params.target, requests, num_slots=NUM_SLOTS, greedy=True
    )
    return {
        "decode_round": speculative.decode_round.lower(*pair, acceptance="coupled"),
        "decode": speculative.decode.lower(*pair, acceptance="coupled"),
        "autoregressive": autoregressive.decode.lower(
            TARGET, params.target, requests, plain, greedy=True
        ),
    }


def test_caches_are_aliased_and_never_copied(params: Params) -> None:
    one_array = BATCH * SMALL_LAYER.num_kv_heads * NUM_SLOTS * SMALL_LAYER.head_dim * 4
    for name, lowered in compiled_programs(params).items():
        num_layers = 2 if name == "autoregressive" else 3  # The head has one.
        program = lowered.compile()
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * num_layers * one_array, name
        operations = re.findall(
            rf"= {re.escape(CACHE_SHAPE)}\S* ([\w-]+)\(", program.as_text()
        )
        made = collections.Counter(operations)
        assert made["dynamic-update-slice"] > 0, name  # The shape is spelled right.
        assert made["copy"] == made["transpose"] == made["scatter"] == 0, (name, made)


def test_nothing_leaves_the_device_inside_the_loop(params: Params) -> None:
    for name, lowered in compiled_programs(params).items():
        text = lowered.compile().as_text()
        found = re.findall(r"callback|infeed|outfeed|= \S+ (?:send|recv)\(", text)
        assert found == [], name
        assert ("while(" in text) or name == "decode_round"


def test_no_step_sorts_the_vocabulary(params: Params) -> None:
    for name, lowered in compiled_programs(params).items():
        text = lowered.compile().as_text()
        sorts = re.findall(r"= \(?(\S+?\[[\d,]*\])\S*.* sort\(", text)
        widths = [
            int(shape.strip("[]").split(",")[-1].split("[")[-1]) for shape in sorts
        ]
        assert CONFIG.vocab_size not in widths, name
        if name != "autoregressive":
            assert text.count('custom_call_target="TopK"') >= DRAFTER.depth
