"""One copy of the caches, nothing but tokens off the device."""

import collections
import functools
import re
from typing import Any

import jax
import pytest

from eagle_jax.decoding import slots, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import (
    LookaheadDrafter,
    RecyclingDrafter,
    RootOnly,
    SmallModel,
    TreeDrafter,
)
from eagle_jax.interface import Params
from eagle_jax.testing.programs import every_line, find_copies
from eagle_jax.tree import chain
from examples import own_target
from tests.decoding.test_tracing import NUM_SLOTS, VOCABULARY, make_pair, requests_like
from tests.tiny import LAYER

pytestmark = pytest.mark.usefixtures("optimised")

BATCH = 2
CACHE_SHAPE = f"f32[{BATCH},{LAYER.num_kv_heads},{NUM_SLOTS},{LAYER.head_dim}]"


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """Compiled as for users."""
    target, drafter, params = make_pair()
    requests = requests_like(0)
    drafting = Decoder(target=target, drafter=drafter)
    resting = Decoder(target=target, drafter=RootOnly(drafter=drafter))
    plain = Decoder(target=target, acceptance="greedy")
    settings = {"num_slots": NUM_SLOTS}
    state = speculative.prefill(drafting, params, requests, **settings)
    begun = speculative.prefill(plain, params, requests, **settings)
    lowered = {
        "decode_round": speculative.decode_round.lower(drafting, params, state),
        "decode": speculative.decode.lower(drafting, params, state),
        "root only": speculative.decode.lower(resting, params, state),
        "autoregressive": speculative.decode.lower(plain, params, begun),
        "slots.generate": slots.generate.lower(drafting, params, state),
        "slots.insert": slots.insert.lower(state, state, 0),
    }
    return {name: program.compile() for name, program in lowered.items()}


def test_caches_are_aliased_and_never_copied(programs: dict[str, Any]) -> None:
    one_array = BATCH * LAYER.num_kv_heads * NUM_SLOTS * LAYER.head_dim * 4
    for name, program in programs.items():
        num_layers = 1 if name == "autoregressive" else 2  # The head has one.
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * num_layers * one_array, name
        operations = re.findall(
            rf"= {re.escape(CACHE_SHAPE)}\S* ([\w-]+)\(", program.as_text()
        )
        made = collections.Counter(operations)
        written = made["dynamic-update-slice"] + made["scatter"]
        assert written > 0, name  # The shape is spelled right.
        assert made["copy"] == made["transpose"] == 0, (name, made)


def test_programs_do_not_grow_with_their_rows() -> None:
    target, drafter, params = make_pair()
    drafting = Decoder(target=target, drafter=drafter)
    plain = Decoder(target=target)

    def compiled(decoder: Decoder, rows: int) -> Any:
        requests = make_requests([[1]] * rows, max_new_tokens=8)
        prefill = functools.partial(speculative.prefill, decoder, num_slots=NUM_SLOTS)
        state = jax.eval_shape(prefill, params, requests)
        return speculative.decode.lower(decoder, params, state).compile()

    for decoder in (drafting, plain):
        few, many = (compiled(decoder, rows).as_text() for rows in (2, 32))
        assert len(many.splitlines()) < 1.1 * len(few.splitlines())
        shape = (32, LAYER.num_kv_heads, NUM_SLOTS, LAYER.head_dim)
        assert find_copies(every_line(many), shape) == []


def test_the_cache_of_any_small_model_is_written_in_place() -> None:
    target, weights = own_target.OwnTarget(), own_target.init_params(seed=0)
    model = SmallModel(target=target, vocab_size=len(own_target.WORDS))
    drafter = TreeDrafter(model=model, tree=chain(1))
    params = Params(target=weights, drafter=weights)
    decoder, requests = Decoder(target=target, drafter=drafter), requests_like(0)
    prefill = functools.partial(speculative.prefill, decoder, num_slots=NUM_SLOTS)
    state: Any = jax.eval_shape(prefill, params, requests)
    program: Any = speculative.decode_round.lower(decoder, params, state).compile()
    shape = state.drafter_state.cache["past"][0][0].shape
    assert find_copies(every_line(program.as_text()), shape) == []


@pytest.mark.parametrize(
    "drafter",
    [LookaheadDrafter(vocab_size=100_000), RecyclingDrafter(vocab_size=400_000)],
    ids=["lookahead", "recycling"],
)
def test_what_was_learned_of_tokens_is_written_in_place(drafter: Any) -> None:
    target, _, params = make_pair()
    weights, requests = Params(target=params.target), requests_like(0)
    # It is far larger than all else in a round.
    decoder = Decoder(target=target, drafter=drafter)
    state = speculative.prefill(decoder, weights, requests, num_slots=NUM_SLOTS)
    compiled: Any = speculative.decode.lower(decoder, weights, state).compile()
    memory = compiled.memory_analysis()
    learned = max(leaf.nbytes for leaf in jax.tree.leaves(state.drafter_state))
    assert memory.temp_size_in_bytes < learned / 4 < memory.alias_size_in_bytes / 4


def test_nothing_leaves_the_device_inside_the_loop(programs: dict[str, Any]) -> None:
    for name, program in programs.items():
        text = program.as_text()
        found = re.findall(r"callback|infeed|outfeed|= \S+ (?:send|recv)\(", text)
        assert found == [], name
        assert ("while(" in text) or name in ("decode_round", "slots.insert")


def test_no_step_sorts_the_vocabulary(programs: dict[str, Any]) -> None:
    for name, program in programs.items():
        text = program.as_text()
        sorts = re.findall(r"= \(?(\S+?\[[\d,]*\])\S*.* sort\(", text)
        widths = [
            int(shape.strip("[]").split(",")[-1].split("[")[-1]) for shape in sorts
        ]
        assert VOCABULARY not in widths, name
        if name not in ("autoregressive", "root only", "slots.insert"):
            assert text.count('custom_call_target="TopK"') >= 3
