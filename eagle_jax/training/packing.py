"""Samples of all lengths in rows of one length, so that one compiled step serves all.

Several samples share a row. Each is a segment that sees itself only, at positions of
its own, so packing changes no loss: it saves the padding.
"""

import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.heads.rows import PackedRows
from eagle_jax.training.encode import EncodedExample

Item = TypeVar("Item")


def pack(samples: Sequence[EncodedExample], length: int) -> PackedRows:
    """Packs samples, the longest first, each into the row that it fills best.

    The same samples in the same order give the same rows. Long samples come into
    early rows: take batches with `rows_at`, which mixes them.

    Args:
        samples: The samples, at least one, each of 1 to `length` tokens, as
            `encode_examples` cuts them.
        length: The number of tokens per row, `T`.
    """
    lengths = np.array([len(sample.tokens) for sample in samples], np.int64)
    places, num_rows = _place(lengths, length)
    shape = (num_rows, length)
    packed = PackedRows(
        tokens=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.bool_),
    )
    for sample, (row, start, segment) in zip(samples, places.tolist(), strict=True):
        span = slice(start, start + len(sample.tokens))
        packed.tokens[row, span] = sample.tokens
        packed.segments[row, span] = segment
        packed.positions[row, span] = np.arange(len(sample.tokens))
        packed.loss_mask[row, span] = sample.loss_mask
    return packed


def _place(lengths: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """Returns the slots of each sample, by best fit, and the number of rows.

    Slots are `[n, 3]` int64: the row, its first slot, and the segment's number in it.
    """
    places = np.zeros((len(lengths), 3), np.int64)
    rows_with_room: list[list[int]] = [[] for _ in range(length + 1)]
    is_there = np.zeros(length + 1, np.bool_)  # Rows with exactly this much room.
    num_segments: list[int] = []
    for sample in np.argsort(-lengths, kind="stable").tolist():
        needed = int(lengths[sample])
        room = needed + int(is_there[needed:].argmax())
        if is_there[room]:
            row = rows_with_room[room].pop()
            is_there[room] = bool(rows_with_room[room])
        else:
            row, room = len(num_segments), length
            num_segments.append(0)
        num_segments[row] += 1
        places[sample] = row, length - room, num_segments[row]
        rows_with_room[room - needed].append(row)
        is_there[room - needed] = True
    return places, len(num_segments)


def rows_at(num_rows: int, step: int, batch_size: int, seed: int) -> np.ndarray:
    """Returns the rows of a step, which depend on the step alone, so runs can resume.

    Every epoch has an order of its own and shows each row at most once; the rows
    that are left over at its end, fewer than a batch, wait for another epoch.

    Args:
        num_rows: The number of rows, `R`.
        step: The number of the step, from 0.
        batch_size: The number of rows per step, `B`.
        seed: The run's seed, 0 or more.

    Returns:
        The rows' indices, `[B]` int64, all different.
    """
    if not 1 <= batch_size <= num_rows:
        raise InputError(
            f"batch_size = {batch_size} must be 1 to {num_rows}, the rows that the "
            "data fill; lower it, shorten the rows or give more data"
        )
    epoch, number = divmod(step, num_rows // batch_size)
    return _order(num_rows, epoch, seed)[number * batch_size :][:batch_size]


@functools.lru_cache(maxsize=4)
def _order(num_rows: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the order of an epoch's rows, `[R]` int64."""
    order = np.random.default_rng((seed, epoch)).permutation(num_rows)
    order.flags.writeable = False  # It is shared between calls.
    return order


def hold_out(
    items: Sequence[Item], *, share: float, seed: int
) -> tuple[list[Item], list[Item]]:
    """Splits items into those to train on and those to evaluate on.

    Split examples before they are encoded: pieces of one text belong together.

    Args:
        items: The items, at least two.
        share: The share of the items to hold out, at least one item.
        seed: The seed, 0 or more; the same seed and number of items give the same
            split.

    Returns:
        The items to train on and those held out, each in the given order.
    """
    count = max(1, round(share * len(items)))
    if count >= len(items):
        raise InputError(
            f"{count} of {len(items)} examples cannot be held out: at least one must "
            "be, and one must be left to train on"
        )
    held = set(np.random.default_rng(seed).permutation(len(items))[:count].tolist())
    return (
        [item for number, item in enumerate(items) if number not in held],
        [item for number, item in enumerate(items) if number in held],
    )
