"""One text, from its request to its last token, and what a call returns of it."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.decoding.logprobs import Logprobs
from eagle_jax.decoding.rates import tokens_per_round
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import StopReason
from eagle_jax.engine.needs import BatchNeeds
from eagle_jax.engine.request import Request
from eagle_jax.engine.wording import TextStream, continuation

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
    """The continuation of one prompt; two are equal if their texts are.

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
        trees: How many rounds each tree drafted, by its sizes; "root" for those without
            drafts.
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
    accept_lengths: list[int] = dataclasses.field(compare=False)
    seed: int
    trees: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)
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


def _beginning(written: str) -> str:
    return repr(written if len(written) <= _SHOWN else written[:_SHOWN] + "...")


class News(NamedTuple):
    """The arrays of a `DecodeState` that say how far its texts go, on the host."""

    tokens: np.ndarray
    lengths: np.ndarray
    stop_reason: np.ndarray
    accept_lengths: np.ndarray
    num_rounds: np.ndarray
    expected: np.ndarray
    logprobs: Logprobs | None


class Text:
    """A text that waits, is being written or has ended; it is known by itself.

    It ends before the first of its stop strings that it contains. Tokens are looked at
    one by one, so that where it ends depends on the text, and not on how many tokens a
    round brought.

    Attributes:
        prompt_ids: The token ids of the prompt.
        request: The settings of its request, for one text whatever `n` is.
        needs: What its batch's programs must be compiled for.
        index: Its number in the order of a call's results.
        priority: Those with a lower one are read before; among equals the first.
        is_watched: Whether it is returned after every round, for its `piece`.
        keeps_rounds: Whether the trees of its rounds are kept.
        token_ids: The token ids so far, with the prefill's token and the stop token.
        stop_reason: The reason why it ended; `RUNNING` if it has not.
        accept_lengths: The number of drafted tokens that each round accepted, uncut by
            limits.
        trees: See `Generation`.
        expected: The number of rounds that were to accept a draft of level 1, and one
            of level 2, by the draft's own confidences.
        logprobs: See `Generation`.
        prompt_logprobs: See `Generation`.
        rounds: The rounds so far, on the host and without the batch's axis, with the
            seconds that each took; kept if `keeps_rounds`.
        length: The tokens of prompt and output, as they were last counted.
        reused: The tokens of the prompt that were not read again, see `Truncating`.
        prefill_seconds: The seconds of reading its prompt.
        decode_seconds: Its share of the seconds of rounds that it had with others.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        request: Request,
        *,
        needs: BatchNeeds,
        tokenizer: Any = None,
        index: int = 0,
    ) -> None:
        """Takes what is asked for; `tokenizer` is a `transformers` tokenizer or none.

        `priority`, `is_watched` and `keeps_rounds` are set before it is added.
        """
        self.prompt_ids, self.request = list(prompt_ids), request
        self.needs, self.index = needs, index
        self.priority = 0
        self.is_watched = self.keeps_rounds = False
        self._tokenizer = tokenizer
        self._told = 0, 0
        self.begin()

    def __repr__(self) -> str:
        """Shows how long it is, not the ids."""
        size = f"{len(self.prompt_ids)} + {len(self.token_ids)} tokens"
        return f"Text({self.index}, {size}, {self.stop_reason.name})"

    def begin(self) -> None:
        """Forgets all that was written, but not what a reader was shown of it."""
        self.token_ids: list[int] = []
        self.stop_reason = StopReason.RUNNING
        self.accept_lengths: list[int] = []
        self.trees: list[str] = []
        self.expected = 0.0, 0.0
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.rounds: list[tuple[Round, float]] = []
        self.reused, self.length = 0, len(self.prompt_ids) + 1
        self.prefill_seconds = self.decode_seconds = 0.0
        self._stream: TextStream | None = None
        self._known = self._shown = ""
        self._num_read = 0

    @property
    def longest(self) -> int:
        """The most tokens that its prompt and output may have."""
        return len(self.prompt_ids) + self.request.max_new_tokens

    @property
    def has_ended(self) -> bool:
        """Whether it is written to its end."""
        return self.stop_reason != StopReason.RUNNING

    @property
    def is_looked_at(self) -> bool:
        """Whether it must be read before it has ended."""
        return self.is_watched or self.keeps_rounds or bool(self.request.stop)

    @property
    def text(self) -> str:
        """What may be shown: nothing that could become part of a stop string."""
        if self._tokenizer is None:
            return ""
        if self._stream is not None:
            return self._shown
        skips, prompt = self.request.skip_special_tokens, self.prompt_ids
        return continuation(
            self._tokenizer, prompt, self.token_ids, skip_special_tokens=skips
        )

    def take(self, news: News, row: int) -> None:
        """Takes in how far a row goes now, up to a stop string."""
        start = len(self.prompt_ids) + len(self.token_ids)
        new = news.tokens[row, start : int(news.lengths[row])].tolist()
        self.token_ids += new
        rounds = slice(len(self.accept_lengths), int(news.num_rounds[row]))
        self.accept_lengths += news.accept_lengths[row, rounds].tolist()
        self.expected = tuple(map(float, news.expected[row]))
        self.stop_reason = StopReason(int(news.stop_reason[row]))
        if news.logprobs is not None:
            self._take_logprobs(news.logprobs, row, start, new)
        if self._tokenizer is not None and self.is_looked_at:
            self._read()

    def piece(self) -> Piece:
        """Returns what is new since the last piece."""
        characters, tokens = self._told
        shown, ids, told = self.text, self.token_ids, self.logprobs
        # A text that begins anew becomes what it was before it goes on.
        self._told = max(characters, len(shown)), max(tokens, len(ids))
        return Piece(
            index=self.index,
            text=shown[characters:],
            token_ids=ids[tokens:],
            logprobs=None if told is None else told[tokens:],
            finish_reason=self.stop_reason.finish_reason,
            generation=self.result() if self.has_ended else None,
        )

    def result(self) -> Generation:
        """Returns what it is so far."""
        return Generation(
            text=self.text,
            token_ids=self.token_ids,
            prompt_ids=self.prompt_ids,
            finish_reason=self.stop_reason.finish_reason,
            stop_reason=self.stop_reason,
            accept_lengths=self.accept_lengths,
            seed=self.request.seed,
            trees=dict(collections.Counter(self.trees)),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
        )

    def _take_logprobs(
        self, found: Logprobs, row: int, start: int, new: list[int]
    ) -> None:
        asked, of_prompt = self.request.logprobs, self.request.prompt_logprobs
        if asked is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += _tell(found, row, start, new, asked)
        if of_prompt is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = _tell(found, row, 1, self.prompt_ids[1:], of_prompt)

    def _read(self) -> None:
        """Reads the new tokens, up to the one that completes a stop string."""
        ids, asked, is_last = self.token_ids, self.request, self.has_ended
        if self._stream is None:
            skips, prompt = asked.skip_special_tokens, self.prompt_ids
            self._stream = TextStream(
                self._tokenizer, prompt, skip_special_tokens=skips
            )
        # Without a string to look for, a round's tokens are read at once.
        first = self._num_read + 1 if asked.stop else len(ids)
        for count in range(min(first, len(ids) + 1 - is_last), len(ids) + 1):
            self._num_read, before = count, len(self._known)
            ends = is_last and count == len(ids)
            self._known += self._stream.update(ids[:count], is_last=ends)
            if count > asked.min_new_tokens and self._cut_at_stop(before):
                self._shown = self._known
                return
        if is_last:
            self._shown = self._known
            last = self._tokenizer.convert_ids_to_tokens(ids[-1:])
            is_kept = asked.include_stop_str_in_output and {*last} <= {*asked.stop}
            if self.stop_reason == StopReason.STOP_TOKEN and is_kept:
                # A special token among the strings, which is not in the text.
                self._shown += last[0]
            return
        held_back = max(map(len, asked.stop), default=1) - 1
        end = max(len(self._shown), len(self._known) - held_back)
        self._shown = self._known[:end]

    def _cut_at_stop(self, before: int) -> bool:
        """Cuts the text if what is known beyond a place completes a stop string."""
        places = [
            (self._known.find(one, max(0, before - len(one) + 1)), one)
            for one in self.request.stop
        ]
        found = [(place, one) for place, one in places if place >= 0]
        if not found:
            return False
        (place, one), count = min(found), self._num_read
        keeps = self.request.include_stop_str_in_output
        self._known = self._known[: place + len(one) * keeps]
        # The first token is the prefill's.
        ends = itertools.accumulate((1 + n for n in self.accept_lengths), initial=1)
        rounds = sum(end < count for end in ends)
        del self.token_ids[count:], self.accept_lengths[rounds:], self.trees[rounds:]
        if self.logprobs is not None:
            del self.logprobs[count:]
        self.stop_reason = StopReason.STOP_STRING
        return True


def _tell(
    found: Logprobs, row: int, start: int, ids: list[int], num_top: int
) -> list[TokenLogprob]:
    """Returns the log-probabilities of the tokens of a row from one place on."""
    places = row, slice(start, start + len(ids))
    arrays = found.own[places], found.top_tokens[places], found.top[places]
    return [
        TokenLogprob(
            token_id=id_,
            logprob=own,
            top=dict(zip(tokens[:num_top], values, strict=False)),
        )
        for id_, own, tokens, values in zip(
            ids, *(array.tolist() for array in arrays), strict=True
        )
    ]
