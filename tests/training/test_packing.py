import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.generation.tokenizer import load_tokenizer
from eagle_jax.training.conversations import Example
from eagle_jax.training.encode import EncodedExample, encode_examples
from eagle_jax.training.packing import (
    PackedRows,
    hold_out,
    pack,
    rows_at,
)
from tests.helpers import refused

LENGTH = 12


def _samples(lengths: list[int]) -> list[EncodedExample]:
    """Samples that can be told apart: token = 1000 * number + place."""
    return [
        EncodedExample(
            tokens=np.arange(1000 * n, 1000 * n + length, dtype=np.int32),
            loss_mask=np.arange(length) % (n % 3 + 1) == 0,
        )
        for n, length in enumerate(lengths, 1)
    ]


def _segments(rows: PackedRows) -> list[EncodedExample]:
    """All segments, by their first token; checks what every row promises."""
    found: list[EncodedExample] = []
    for tokens, segments, positions, mask in zip(
        rows.tokens, rows.segments, rows.positions, rows.loss_mask, strict=True
    ):
        steps = np.diff(segments)
        used = int((segments > 0).sum())
        # Contiguous, numbered 1, 2, ... from the row's start, padding at the end.
        assert segments[0] == 1 and set(steps[: used - 1].tolist()) <= {0, 1}
        assert not segments[used:].any() and not tokens[used:].any()
        assert not positions[used:].any() and not mask[used:].any()
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
            found.append(EncodedExample(tokens=tokens[inside], loss_mask=mask[inside]))
    return sorted(found, key=lambda sample: sample.tokens[0])


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=40))
def test_every_sample_is_in_exactly_one_place(lengths: list[int]) -> None:
    samples = _samples(lengths)
    rows = pack(samples, LENGTH)
    assert rows.tokens.shape[1] == LENGTH
    for found, given_ in zip(_segments(rows), samples, strict=True):
        np.testing.assert_array_equal(found.tokens, given_.tokens)
        np.testing.assert_array_equal(found.loss_mask, given_.loss_mask)
    total = rows.tokens.size
    assert rows.padding == pytest.approx(1 - sum(lengths) / total)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=40))
def test_no_two_rows_could_be_one(lengths: list[int]) -> None:
    used = np.sort((pack(_samples(lengths), LENGTH).segments > 0).sum(axis=1))
    assert len(used) == 1 or used[0] + used[1] > LENGTH


def test_a_sample_goes_where_it_leaves_the_least_room() -> None:
    rows = pack(_samples([4, 9, 8, 3]), LENGTH)
    assert rows.padding == 0
    assert [sorted(set(row // 1000)) for row in rows.tokens] == [[2, 4], [1, 3]]


def test_rows_have_fixed_types_and_are_the_same_every_time() -> None:
    samples = _samples([3, 3, 5, 7, 1])
    first, second = pack(samples, LENGTH), pack(samples, LENGTH)
    for name in ("tokens", "segments", "positions", "loss_mask"):
        one, other = getattr(first, name), getattr(second, name)
        np.testing.assert_array_equal(one, other)
        assert one.dtype == (np.bool_ if name == "loss_mask" else np.int32)


def _chat_lengths(count: int) -> np.ndarray:
    """Lengths like those of ShareGPT conversations: log-normal, cut at 2,048."""
    drawn = np.random.default_rng(0).lognormal(np.log(900), 1.1, size=count)
    return np.clip(drawn.astype(int), 8, 2048)


def test_chats_fill_rows_of_2048_tokens() -> None:
    lengths = _chat_lengths(10_000).tolist()
    rows = pack(_samples(lengths), 2048)
    assert rows.padding < 0.02
    assert int((rows.segments > 0).sum()) == sum(lengths)


def test_a_sample_is_placed_with_as_much_work_among_many_as_among_few() -> None:
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    def work(samples: list[EncodedExample]) -> int:
        calls[0] = 0
        sys.setprofile(count)
        try:
            pack(samples, LENGTH)
        finally:
            sys.setprofile(None)
        return calls[0]

    lengths = np.random.default_rng(0).integers(1, LENGTH + 1, size=1_000).tolist()
    few, many = work(_samples(lengths[:250])), work(_samples(lengths))
    assert few > 250 and many < 4.1 * few


def test_few_chats_fill_rows_too() -> None:
    lengths = _chat_lengths(200).tolist()
    assert pack(_samples(lengths), 2048).padding < 0.15


def test_real_questions_fill_rows_of_2048_tokens(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "models" / "stories260K", 512)
    texts = [
        "\n".join(json.loads(line)["turns"])
        for path in sorted((shared / "data" / "eagle").glob("*/question.jsonl"))
        for line in path.read_text().splitlines()
    ]
    examples = [Example(where="", text=text) for text in texts]
    encoded = encode_examples(examples, tokenizer, max_length=2048)
    rows = pack(encoded.samples, 2048)
    assert len(rows) > 50
    assert rows.padding < 0.15


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        ([], "there is no sample to pack"),
        ([3, LENGTH + 1], "sample 1 has 13 tokens, but a row holds 1 to 12"),
        ([3, 0, 2], "sample 1 has 0 tokens"),
    ],
)
def test_what_fits_no_row_is_refused(lengths: list[int], named: str) -> None:
    refused(lambda: pack(_samples(lengths), LENGTH), named)


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 30), size=st.integers(1, 30), seed=st.integers(0, 2**31 - 1)
)
def test_an_epoch_shows_each_row_at_most_once(
    num_rows: int, size: int, seed: int
) -> None:
    size = min(size, num_rows)
    steps = num_rows // size
    for epoch in range(3):
        order = [
            rows_at(num_rows, epoch * steps + step, size, seed) for step in range(steps)
        ]
        seen = np.concatenate(order)
        assert all(len(batch) == size for batch in order)
        assert len(set(seen.tolist())) == steps * size
        assert seen.min() >= 0 and seen.max() < num_rows


def test_batches_depend_on_step_and_seed_alone() -> None:
    steps = list(range(25))
    forward = [rows_at(10, step, 3, 7).tolist() for step in steps]
    backward = [rows_at(10, step, 3, 7).tolist() for step in reversed(steps)]
    assert forward == backward[::-1]
    assert forward[:3] != forward[3:6]  # Another epoch, another order.
    assert forward[:3] != [rows_at(10, step, 3, 8).tolist() for step in range(3)]
    assert {row for batch in forward for row in batch} == set(range(10))


def test_a_caller_cannot_spoil_later_batches() -> None:
    batch = rows_at(10, 0, 3, 7)
    with pytest.raises(ValueError, match="read-only"):
        batch[0] = 5


def test_a_batch_is_those_rows() -> None:
    rows = pack(_samples([9, 10, 11, 12]), LENGTH)
    chosen = rows_at(4, 1, 2, 3)
    batch = rows[chosen]
    np.testing.assert_array_equal(batch.tokens, rows.tokens[chosen])
    np.testing.assert_array_equal(batch.loss_mask, rows.loss_mask[chosen])
    assert len(batch) == 2


@pytest.mark.parametrize("size", [0, 5])
def test_a_batch_of_more_rows_than_there_are_is_refused(size: int) -> None:
    refused(lambda: rows_at(4, 0, size, 0), f"batch_size = {size} must be 1 to 4")


@given(
    count=st.integers(2, 50), share=st.floats(0.01, 0.9), seed=st.integers(0, 2**31 - 1)
)
def test_a_split_loses_and_doubles_nothing(count: int, share: float, seed: int) -> None:
    items = list(range(count))
    if round(share * count) >= count:
        return
    kept, held = hold_out(items, share=share, seed=seed)
    assert sorted(kept + held) == items
    assert kept == sorted(kept) and held == sorted(held)
    assert len(held) == max(1, round(share * count))
    assert (kept, held) == hold_out(items, share=share, seed=seed)


def test_another_seed_holds_out_others() -> None:
    splits = {tuple(hold_out(range(100), share=0.09, seed=s)[1]) for s in range(5)}
    assert len(splits) == 5 and all(len(held) == 9 for held in splits)


@pytest.mark.parametrize(
    ("share", "named"),
    [
        (0.0, "share 0.0 must be between"),
        (1.0, "share 1.0 must be between"),
        (0.9, "3 of 3 examples cannot be held out"),
    ],
)
def test_a_split_with_an_empty_side_is_refused(share: float, named: str) -> None:
    refused(lambda: hold_out([1, 2, 3], share=share, seed=0), named)
