import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import PackedRows, hold_out, pack, rows_at
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
    again = pack(samples, LENGTH)
    for name in ("tokens", "segments", "positions", "loss_mask"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(again, name))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=40))
def test_no_two_rows_could_be_one(lengths: list[int]) -> None:
    used = np.sort((pack(_samples(lengths), LENGTH).segments > 0).sum(axis=1))
    assert len(used) == 1 or used[0] + used[1] > LENGTH


def test_a_sample_goes_where_it_leaves_the_least_room() -> None:
    rows = pack(_samples([4, 9, 8, 3]), LENGTH)
    assert rows.padding == 0
    assert [sorted(set(row // 1000)) for row in rows.tokens] == [[2, 4], [1, 3]]


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
    splits = {tuple(hold_out(range(100), share=0.09, seed=s)[1]) for s in range(5)}
    assert len(splits) == 5


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda: rows_at(4, 0, 0, 0), "batch_size = 0 must be 1 to 4"),
        (lambda: rows_at(4, 0, 5, 0), "batch_size = 5 must be 1 to 4"),
        (
            lambda: hold_out([1, 2, 3], share=0.9, seed=0),
            "3 of 3 examples cannot be held out",
        ),
    ],
)
def test_what_fits_nowhere_is_refused(act: Callable[[], object], named: str) -> None:
    refused(act, named)
