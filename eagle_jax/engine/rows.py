"""The texts of a batch on the host."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from eagle_jax.decoding.logprobs import Logprobs
from eagle_jax.decoding.state import DecodeState, StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLogprobs:
    """The log-probabilities of a text's tokens.

    Attributes:
        own: Those of the generated tokens.
        top: Beside each, the likeliest tokens and theirs, best first.
        prompt: Those of the prompt's tokens after its first, which has none; `None`
            unless they were asked for.
    """

    own: list[float]
    top: list[dict[int, float]]
    prompt: "RowLogprobs | None" = None

    def first(self, num_tokens: int) -> "RowLogprobs":
        """Returns those of the first generated tokens."""
        own, top = self.own[:num_tokens], self.top[:num_tokens]
        return dataclasses.replace(self, own=own, top=top)


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
        logprobs: The log-probabilities of the tokens; `None` unless they were asked
            for.
    """

    prompt_ids: list[int]
    generated_ids: list[int]
    stop_reason: StopReason
    accept_lengths: list[int]
    expected: tuple[float, ...] = (0.0, 0.0)
    logprobs: RowLogprobs | None = None

    @classmethod
    def begin(cls, prompt_ids: Sequence[int]) -> "Row":
        """Returns a text of which nothing is generated yet."""
        return cls(
            prompt_ids=list(prompt_ids),
            generated_ids=[],
            stop_reason=StopReason.RUNNING,
            accept_lengths=[],
        )

    def cut(self, num_tokens: int) -> "Row":
        """Returns the text up to a token that completed a stop string."""
        # The first token is the prefill's.
        ends = itertools.accumulate((1 + n for n in self.accept_lengths), initial=1)
        rounds = sum(end < num_tokens for end in ends)
        return dataclasses.replace(
            self,
            generated_ids=self.generated_ids[:num_tokens],
            stop_reason=StopReason.STOP_STRING,
            accept_lengths=self.accept_lengths[:rounds],
            logprobs=self.logprobs and self.logprobs.first(num_tokens),
        )


def read_rows(state: DecodeState, fetch: Callable[[Any], Any]) -> list[Row]:
    """Returns the texts of a state; `fetch` brings arrays to the host."""
    tokens, lengths, reasons, accepted, rounds, expected, starts, logprobs = fetch(
        (
            state.tokens,
            state.lengths,
            state.stop_reason,
            state.accept_lengths,
            state.num_rounds,
            state.expected,
            state.rows.prompt_lengths,
            state.logprobs,
        )
    )
    return [
        Row(
            prompt_ids=tokens[row, : starts[row]].tolist(),
            generated_ids=tokens[row, starts[row] : lengths[row]].tolist(),
            stop_reason=StopReason(int(reasons[row])),
            accept_lengths=accepted[row, : rounds[row]].tolist(),
            expected=tuple(map(float, expected[row])),
            logprobs=logprobs
            and _row_logprobs(logprobs, row, starts[row], lengths[row]),
        )
        for row in range(len(lengths))
    ]


def _row_logprobs(found: Logprobs, row: int, start: int, length: int) -> RowLogprobs:
    """Returns what was found of a row whose prompt ends at `start`."""

    def between(begin: int, end: int, prompt: RowLogprobs | None = None) -> RowLogprobs:
        places = row, slice(begin, end)
        pairs = zip(
            found.top_tokens[places].tolist(), found.top[places].tolist(), strict=True
        )
        return RowLogprobs(
            own=found.own[places].tolist(),
            top=[dict(zip(tokens, values, strict=True)) for tokens, values in pairs],
            prompt=prompt,
        )

    prompt = between(1, start) if found.config.prompt else None
    return between(start, length, prompt)
