"""Texts that enter and leave a running batch are those that they are alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, slots
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import grow
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.slots import Result
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.drafting import LookupDrafter, SmallModel, SwitchDrafter, TreeDrafter
from eagle_jax.interface import Drafter, Params
from eagle_jax.interface import prefill as reading
from eagle_jax.testing import ToyModel, ToyTarget, assert_same_tokens
from eagle_jax.tree import chain
from tests import tiny
from tests.helpers import refused, texts

TOY = ToyTarget()
TREE = TreeConfig(num_nodes=8, depth=2, width=3)
TOYS = {
    "drafted": Decoder(target=TOY, drafter=TreeDrafter(model=ToyModel(), tree=TREE)),
    "plain": Decoder(target=TOY),
}
PARAMS = Params(target=(), drafter=jnp.float32(0.7))


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Prompts and limits of all lengths, greedy and sampled rows, some that stop."""
    rng = np.random.default_rng(0)
    return [
        {
            "prompts": [rng.integers(0, 8, rng.integers(1, 17)).tolist()],
            "max_new_tokens": int(rng.choice([1, 2, 9, 40])),
            "temperature": float(rng.choice([0.0, 1.0])),
            "top_k": int(rng.choice([0, 3])),
            "stop_tokens": [3] if rng.random() < 0.3 else [],
            "seeds": number,
        }
        for number in range(count)
    ]


def plain_texts(decoder: Decoder, asked: list[Requests]) -> list[list[int]]:
    """What plain decoding makes of the same requests, all in one batch."""
    together = jax.tree.map(lambda *rows: jnp.concatenate(rows), *asked)
    state = autoregressive.generate(decoder, PARAMS, together, num_slots=64)
    return texts(together, state)


def serve(
    decoder: Decoder, asked: list[Requests], batch: int, rounds: int
) -> list[list[int]]:
    """The texts of requests that enter a row as soon as one is free."""
    state = slots.init_decode_state(decoder, PARAMS, batch=batch, num_slots=64)
    found: list[list[int]] = [[] for _ in asked]
    rows: list[int | None] = [None] * batch
    waiting = list(range(len(asked)))

    def take(result: Result) -> None:
        for row, number in enumerate(rows):
            if number is not None:
                found[number] += result.tokens[row, : int(result.counts[row])].tolist()
                if result.is_finished[row]:
                    rows[row] = None

    while waiting or any(number is not None for number in rows):
        for row in range(batch):
            if rows[row] is not None or not waiting:
                continue
            number = waiting.pop(0)
            prefix, first = slots.prefill(decoder, PARAMS, asked[number], num_slots=64)
            found[number] += first.tokens[0].tolist()
            if not first.is_finished[0]:
                state, rows[row] = slots.insert(prefix, state, row), number
        state, result = slots.generate(decoder, PARAMS, state, rounds=rounds)
        take(result)
    return found


@pytest.mark.parametrize("kind", ["drafted", "plain"])
@pytest.mark.parametrize(("batch", "rounds"), [(8, 4), (1, 1)])
def test_texts_that_share_rows_are_those_of_each_alone(
    kind: str, batch: int, rounds: int
) -> None:
    count = 200 if batch > 1 else 5
    asked = [make_requests(**request) for request in mixed_requests(count)]
    decoder = TOYS[kind]
    programs: list[Any] = [slots.prefill, slots.insert, slots.generate]
    before = [program._cache_size() for program in programs]
    found = serve(decoder, asked, batch, rounds)
    added = [
        program._cache_size() - size
        for program, size in zip(programs, before, strict=True)
    ]
    assert added[0] <= 1 and added[1] <= 1 and added[2] <= 1
    wanted = plain_texts(decoder, asked)
    assert_same_tokens(found, wanted)
    assert batch == 1 or {len(text) for text in wanted} >= {1, 2, 9}


def test_a_call_ends_with_the_first_text_that_does() -> None:
    decoder = TOYS["plain"]
    state = slots.init_decode_state(decoder, PARAMS, batch=3, num_slots=64)
    for row, new_tokens in enumerate([4, 9]):
        asked = make_requests([[row]], max_new_tokens=new_tokens)
        state = slots.insert(
            slots.prefill(decoder, PARAMS, asked, num_slots=64)[0], state, row
        )
    state, result = slots.generate(decoder, PARAMS, state, rounds=16)
    assert result.counts.tolist() == result.num_rounds.tolist() == [3, 3, 0]
    assert result.is_finished.tolist() == [True, False, True]
    assert result.stop_reason.tolist() == [
        StopReason.MAX_TOKENS,
        StopReason.RUNNING,
        StopReason.FREE,
    ]
    state, result = slots.generate(decoder, PARAMS, slots.free(state, 1))
    assert result.counts.tolist() == [0, 0, 0]
    assert int(state.stop_reason[1]) == StopReason.FREE


def test_nothing_stands_after_a_count_in_a_full_row_either() -> None:
    state = slots.init_decode_state(TOYS["plain"], PARAMS, batch=1, num_slots=64)
    full = dataclasses.replace(
        state, tokens=jnp.ones_like(state.tokens), lengths=jnp.array([64])
    )
    result = slots._added(full, jnp.array([62]), state.num_rounds, width=4, rounds=1)
    assert result.tokens.tolist() == [[1, 1, 0, 0]]


def test_a_larger_cache_takes_over_the_rows() -> None:
    decoder = TOYS["drafted"]
    asked = make_requests([[1, 2]], max_new_tokens=100, temperature=1.0)
    state = slots.init_decode_state(decoder, PARAMS, batch=2, num_slots=64)
    prefix, first = slots.prefill(decoder, PARAMS, asked, num_slots=64)
    state, text = slots.insert(prefix, state, 1), first.tokens[0].tolist()
    while True:
        state, result = slots.generate(decoder, PARAMS, state)
        text += result.tokens[1, : int(result.counts[1])].tolist()
        if result.is_finished[1]:
            break
        if int(result.num_rounds[1]) < 16:
            assert state.tokens.shape[1] == 64  # Once is enough.
            state = grow(decoder, state, num_slots=128)
    expected = autoregressive.generate(decoder, PARAMS, asked)
    assert_same_tokens([text], texts(asked, expected))


PAIR = tiny.pair(tiny.TARGET, tiny.HEAD, TREE)
READERS: dict[str, Drafter] = {
    "head": PAIR.drafter,
    "small model": TreeDrafter(
        model=SmallModel(target=PAIR.target, vocab_size=64), tree=chain(2)
    ),
    "switch": SwitchDrafter(
        first=LookupDrafter(depth=2), second=PAIR.drafter, min_match=2
    ),
}


@pytest.mark.parametrize(
    ("reader", "length"),
    [("head", 1), ("head", 32), ("small model", 9), ("switch", 9)],
)
def test_a_prompt_read_beside_running_rows_is_read_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, reader: str, length: int
) -> None:
    """States, not only texts: what the drafter reads wrongly shows in no text."""
    drafter = READERS[reader]
    decoder = Decoder(target=PAIR.target, drafter=drafter, acceptance="greedy")
    is_small = reader == "small model"
    weights = PAIR.params.target if is_small else PAIR.params.drafter
    params = Params(target=PAIR.params.target, drafter=weights)
    asked = make_requests(
        [list(range(2, 2 + length))], max_new_tokens=9, prompt_bucket=32
    )
    whole, first = slots.prefill(decoder, params, asked, num_slots=64)
    running = slots.init_decode_state(decoder, params, batch=2, num_slots=64)
    other = make_requests([[5, 6]], max_new_tokens=20, prompt_bucket=32)
    running = slots.insert(
        slots.prefill(decoder, params, other, num_slots=64)[0], running, 0
    )
    monkeypatch.setattr(reading, "PREFILL_CHUNK", 8)
    # A decoder of its own: programs are kept by decoder, and have the usual chunks.
    decoder = dataclasses.replace(decoder, acceptance="coupled")
    assert slots.num_chunks(asked) == -(-length // 8)
    prefix = slots.start_prefill(decoder, params, asked, num_slots=64)
    for _ in range(slots.num_chunks(asked)):
        prefix = slots.prefill_chunk(decoder, params, prefix)
        running, _ = slots.generate(decoder, params, running, rounds=1)
    chunks, begun = slots.finish_prefill(decoder, params, prefix, num_slots=64)
    assert begun.tokens.tolist() == first.tokens.tolist()
    assert_same_state(chunks, whole)
    running = slots.insert(chunks, running, 1)
    running, result = slots.generate(decoder, params, running, rounds=9)
    expected = autoregressive.generate(decoder, params, asked, num_slots=64)
    text = begun.tokens[0].tolist() + result.tokens[1].tolist()
    assert text[: int(result.counts[1]) + 1] == texts(asked, expected)[0]


def assert_same_state(one: DecodeState, other: DecodeState) -> None:
    """Compares all but slots after a cache's length, which hold what is never read."""

    def compare(path: Any, a: jax.Array, b: jax.Array) -> None:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if a.ndim == 4:  # Keys and values, `[B, G, S, A]`; a head's has a pair less.
            is_drafters = "drafter" in str(path[0])
            length = int(one.lengths[0]) - (2 if is_drafters else 1)
            a, b = a[:, :, :length], b[:, :, :length]
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare, one, other)


PLAIN = TOYS["plain"]


def begun(length: int = 2, num_slots: int = 64) -> DecodeState:
    asked = make_requests([[1] * length], max_new_tokens=9)
    return slots.prefill(PLAIN, PARAMS, asked, num_slots=num_slots)[0]


def free_rows() -> DecodeState:
    return slots.init_decode_state(PLAIN, PARAMS, batch=2, num_slots=64)


def start(length: int = 2, rule: Any = "coupled", **settings: Any) -> Any:
    decoder = Decoder(target=TOY, acceptance=rule)
    asked = make_requests([[1] * length], max_new_tokens=1, **settings)
    return slots.start_prefill(decoder, PARAMS, asked, num_slots=64)


def finish_after(num_chunks: int) -> None:
    # A rule that no other test has: programs are kept by decoder.
    decoder, prefix = Decoder(target=TOY, acceptance="rejection"), start(9, "rejection")
    for _ in range(num_chunks):
        prefix = slots.prefill_chunk(decoder, PARAMS, prefix)
    slots.finish_prefill(decoder, PARAMS, prefix, num_slots=64)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda: start(65), "padded to 128 tokens do not fit into num_slots = 64"),
        (lambda: start(prompt_bucket=12), "padded to 12 tokens are no whole chunks"),
        (lambda: start(rule="greedy", temperature=1.0), "argmax, but temperature = 1"),
        (lambda: finish_after(1), "8 tokens were read of a prompt of 9; call `prefill"),
        (lambda: finish_after(3), "24 tokens were read of a prompt of 9; call `prefi"),
        (
            lambda: slots.insert(begun(num_slots=128), free_rows(), 0),
            "the prefix does not fit into the state; make both with the same decoder",
        ),
        (
            lambda: slots.insert(begun(), free_rows(), -1),
            "slot = -1 is no row; the state has rows 0 to 1",
        ),
        (lambda: slots.insert(begun(), free_rows(), 0, 1), "row = 1 is no row; the st"),
        (lambda: slots.free(free_rows(), jnp.int32(7)), "slot = 7 is no row; the sta"),
        (
            lambda: slots.generate(PLAIN, PARAMS, begun(), rounds=0),
            "rounds = 0 must be at least 1",
        ),
        (
            lambda: slots.generate(TOYS["drafted"], PARAMS, begun(63)),
            "no room for a round in its 64 slots; give the state more with `grow",
        ),
    ],
)
def test_what_would_go_wrong_silently_is_refused(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any], named: str
) -> None:
    if "chunk" in named or "were read" in named:
        monkeypatch.setattr(reading, "PREFILL_CHUNK", 8)
    refused(act, named)
