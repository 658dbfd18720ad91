"""What a call returns: texts with all that is known of them."""

import dataclasses
import math
from typing import Any

from eagle_jax.decoding.rates import tokens_per_round
from eagle_jax.decoding.state import StopReason
from eagle_jax.engine import text
from eagle_jax.engine.rows import RowLogprobs
from eagle_jax.engine.served import Served

_SHOWN = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The log-probability of one token, in nats.

    Attributes:
        token_id: The token.
        logprob: Its log-probability.
        top: The likeliest tokens at its place and theirs, best first; as many as were
            asked for.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
        text: The text that was added to the prompt.
        token_ids: The token ids of that text, a stop token included, and those of a
            stop string, whether the text keeps it or not.
        prompt_ids: The token ids of the prompt.
        finish_reason: "stop" after a stop token or string, "length" at a limit,
            "constraint" where the constraint allowed no token.
        stop_reason: The same in more detail.
        accept_lengths: The number of drafted tokens that each round accepted, uncut by
            limits.
        seed: The seed that it drew with; given again, it draws the same text.
        logprobs: One entry per token of `token_ids`; `None` unless asked for.
        prompt_logprobs: One per token of `prompt_ids` after the first, which has none;
            `None` unless asked for.
        prefill_seconds: The seconds of reading the prompt, or its share of them.
        decode_seconds: Its share of the seconds of rounds that it had with others.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str | None
    stop_reason: StopReason
    accept_lengths: list[int]
    seed: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    prefill_seconds: float = dataclasses.field(default=0.0, compare=False)
    decode_seconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def tokens_per_round(self) -> float | None:
        """The tokens that a round emitted on average (tau); `None` without a round."""
        return tokens_per_round([len(self.token_ids)], len(self.accept_lengths))

    @property
    def usage(self) -> dict[str, int]:
        """The tokens that were read and made, as OpenAI names them, and the rounds."""
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": len(self.token_ids),
            "rounds": len(self.accept_lengths),
        }

    def __repr__(self) -> str:
        """Shows the text and its figures, not the ids."""
        rate = self.tokens_per_round
        figures = f"{len(self.prompt_ids)} + {len(self.token_ids)} tokens"
        if rate is not None:
            figures += f", {rate:.2f} per round"
        return f"Generation({_beginning(self.text)}, {figures}, {self.finish_reason})"

    @classmethod
    def of(cls, tokenizer: Any, served: Served) -> "Generation":
        """Returns what a text that has ended became."""
        row, asked = served.row, served.settings
        if served.stopping is not None:
            written = served.stopping.text
        else:
            written = text.continuation(
                tokenizer,
                row.prompt_ids,
                row.generated_ids,
                skip_special_tokens=asked.skip_special_tokens,
            )
        return cls(
            text=written,
            token_ids=row.generated_ids,
            prompt_ids=row.prompt_ids,
            finish_reason=row.stop_reason.finish_reason,
            stop_reason=row.stop_reason,
            accept_lengths=row.accept_lengths,
            seed=asked.seed,
            logprobs=tell_logprobs(row.logprobs, row.generated_ids, asked.logprobs),
            prompt_logprobs=tell_logprobs(
                row.logprobs and row.logprobs.prompt,
                row.prompt_ids[1:],
                asked.prompt_logprobs,
            ),
            prefill_seconds=served.prefill_seconds,
            decode_seconds=served.decode_seconds,
        )


def _beginning(written: str) -> str:
    return repr(written if len(written) <= _SHOWN else written[:_SHOWN] + "...")


def tell_logprobs(
    found: RowLogprobs | None, ids: list[int], num_top: int | None
) -> list[TokenLogprob] | None:
    """Returns the log-probabilities of tokens; `None` if nobody asked."""
    if found is None or num_top is None:
        return None
    return [
        TokenLogprob(
            token_id=id_,
            logprob=own,
            # Those that a filter forbids have none.
            top={k: v for k, v in list(top.items())[:num_top] if v > -math.inf},
        )
        for id_, own, top in zip(ids, found.own, found.top, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What one round added to a text; `str(piece)` is the text alone.

    Attributes:
        index: The number of the text, in the order of a call's results.
        text: The text that became certain.
        token_ids: The token ids that the round brought; a character may be split over
            several, and what might become a stop string is held back.
        logprobs: The log-probabilities of these; `None` unless asked for.
        finish_reason: Why the text has ended; `None` while it goes on.
        generation: The whole text, once it has ended.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    generation: Generation | None = None

    def __str__(self) -> str:
        """Returns the text."""
        return self.text

    def __repr__(self) -> str:
        """Shows the text and how long it is, not the ids."""
        ended = f", {self.finish_reason}" if self.finish_reason else ""
        size = f"{len(self.token_ids)} tokens"
        return f"Piece({self.index}, {_beginning(self.text)}, {size}{ended})"


class Pieces:
    """Tells what is new of texts that a scheduler returns again and again."""

    def __init__(self, tokenizer: Any) -> None:
        """Starts before the first; `tokenizer` is a `transformers` tokenizer."""
        self._tokenizer = tokenizer
        self._seen: dict[Any, tuple[int, int]] = {}

    def next(self, served: Served) -> Piece:
        """Returns what a streamed text brought since it was seen last."""
        assert served.stopping is not None, "the text is streamed"
        shown, ids = served.stopping.text, served.row.generated_ids
        characters, tokens = self._seen.get(served.key, (0, 0))
        # A text that begins anew becomes what it was before it goes on.
        self._seen[served.key] = max(characters, len(shown)), max(tokens, len(ids))
        reason = served.row.stop_reason.finish_reason
        told = tell_logprobs(served.row.logprobs, ids, served.settings.logprobs)
        done = None
        if reason is not None:
            done = Generation.of(self._tokenizer, served)
            del self._seen[served.key]
        return Piece(
            index=served.key,
            text=shown[characters:],
            token_ids=ids[tokens:],
            logprobs=told and told[tokens:],
            finish_reason=reason,
            generation=done,
        )
