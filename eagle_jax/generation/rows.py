"""The texts of a batch on the host."""

import dataclasses
from collections.abc import Callable
from typing import Any

from eagle_jax.decoding.state import DecodeState, StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The text of one request so far.

    Attributes:
        prompt_ids: The token ids of the prompt.
        generated_ids: The token ids that were generated, with the prefill's token and
            the stop token.
        stop_reason: The reason why the text ended; `RUNNING` if it has not ended.
        accept_lengths: The number of drafted tokens that each round accepted, uncut by
            limits.
        expected: The number of rounds that were to accept a draft of level 1, and one
            of level 2, by the draft's own confidences.
    """

    prompt_ids: list[int]
    generated_ids: list[int]
    stop_reason: StopReason
    accept_lengths: list[int]
    expected: tuple[float, ...] = (0.0, 0.0)


def read_rows(state: DecodeState, fetch: Callable[[Any], Any]) -> list[Row]:
    """Returns the texts of a state; `fetch` brings arrays to the host."""
    tokens, lengths, reasons, accepted, rounds, expected, starts = fetch(
        (
            state.tokens,
            state.lengths,
            state.stop_reason,
            state.accept_lengths,
            state.num_rounds,
            state.expected,
            state.rows.prompt_lengths,
        )
    )
    return [
        Row(
            prompt_ids=tokens[row, : starts[row]].tolist(),
            generated_ids=tokens[row, starts[row] : lengths[row]].tolist(),
            stop_reason=StopReason(int(reasons[row])),
            accept_lengths=accepted[row, : rounds[row]].tolist(),
            expected=tuple(map(float, expected[row])),
        )
        for row in range(len(lengths))
    ]
