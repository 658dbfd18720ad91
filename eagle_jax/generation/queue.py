"""Where each text of a scheduler is, whatever interrupts it."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.requests import check_request
from eagle_jax.decoding.state import DecodeState
from eagle_jax.errors import InputError
from eagle_jax.generation.rows import Row
from eagle_jax.generation.runner import Runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A text that has ended.

    Attributes:
        key: What `Scheduler.add` was given to know it by.
        row: The text.
        prefill_seconds: The seconds of reading its prompt.
        decode_seconds: Its share of the seconds of rounds that it had with others.
    """

    key: Any
    row: Row
    prefill_seconds: float
    decode_seconds: float


@dataclasses.dataclass(kw_only=True, eq=False)
class Text:
    """A text that waits or is being written.

    Its tokens are the state's: to look at them again changes nothing.

    Attributes:
        key: What it is known by.
        prompt_ids: The token ids of its prompt.
        seed: The seed of its draws.
        length: The tokens of prompt and output, when it was last looked at.
        num_rounds: Its rounds until then.
        prefill_seconds: See `Served`.
        decode_seconds: See `Served`.
    """

    key: Any
    prompt_ids: list[int]
    seed: int
    length: int
    num_rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A long prompt that is being read.

    Attributes:
        text: The prompt's text.
        prefix: What is read of it.
        num_slots: The number of its cache slots.
        slot: The row that is kept for it.
        num_left: The chunks that are left.
    """

    text: Text
    prefix: PrefillState
    num_slots: int
    slot: int
    num_left: int


class Queue:
    """Texts that wait, are being read, have a row, or have ended.

    Attributes:
        is_broken: Whether a program may have been given the rows' arrays and returned
            nothing: then nothing but `reset` helps.
    """

    def __init__(self, runner: Runner) -> None:
        """Starts without a text."""
        self.is_broken = False
        self._runner = runner
        self._waiting: deque[Text] = deque()
        self._reading: Reading | None = None
        self._rows: list[Text | None] = [None] * runner.batch_size
        self._state: DecodeState | None = None
        self._done: list[tuple[Text, Row]] = []

    def reset(self) -> list[tuple[Any, list[int], int]]:
        """Empties the queue and the rows; what was compiled is kept.

        Returns:
            The key, the prompt and the seed of every text that had not ended, for
            `add`: it begins anew. The next step returns those that had ended.
        """
        reading = () if self._reading is None else (self._reading.text,)
        places = [text for text in self._rows if text is not None]
        # An interrupt may have met one on its way, in two places at once.
        left = dict.fromkeys([*places, *reading, *self._waiting])
        for text, _ in self._done:
            left.pop(text, None)
        given = [(text.key, text.prompt_ids, text.seed) for text in left]
        waiting: deque[Text] = deque()
        rows: list[Text | None] = [None] * self._runner.batch_size
        # Nothing can come between these.
        self._waiting, self._rows, self._reading = waiting, rows, None
        self._state, self.is_broken = None, False
        return given

    def add(self, key: Any, prompt_ids: Sequence[int], seed: int) -> None:
        """Puts a prompt at the queue's end.

        Args:
            key: What the text is known by when it has ended.
            prompt_ids: The prompt's token ids, fewer than `max_length`.
            seed: The seed of its draws.

        Raises:
            InputError: If the prompt is empty, too long or holds what is no id, if the
                seed is no uint32, or `is_broken`.
        """
        self._check_whole()
        self._waiting.append(self._text("the prompt", key, prompt_ids, seed))

    @property
    def num_waiting(self) -> int:
        """The prompts in the queue."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether every text that was added has ended and been returned."""
        is_empty = not self._waiting and not any(self._rows)
        return is_empty and self._reading is None and not self._done

    def _text(self, name: str, key: Any, prompt_ids: Sequence[int], seed: int) -> Text:
        check_request(
            name,
            prompt_ids,
            seed,
            max_length=self._runner.max_length,
            vocab_size=self._runner.pair.target.config.vocab_size,
        )
        prompt = list(prompt_ids)
        return Text(key=key, prompt_ids=prompt, seed=seed, length=len(prompt) + 1)

    def _check_whole(self) -> None:
        if self.is_broken:
            raise InputError(
                "the scheduler was interrupted inside a program; call `reset()`, and "
                "`add` again what it returns"
            )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Marks all as broken until what is within has come about.

        A text goes to its new place there before it leaves the old one.
        """
        self.is_broken = True
        yield
        self.is_broken = False

    @property
    def _free(self) -> list[int]:
        kept = None if self._reading is None else self._reading.slot
        return [row for row, text in enumerate(self._rows) if not text and row != kept]

    @property
    def _running(self) -> dict[int, Text]:
        """The texts that are being written, by row."""
        return {row: text for row, text in enumerate(self._rows) if text is not None}
