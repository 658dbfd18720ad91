"""Texts by the target itself: what a head is best trained on (EAGLE-1, table 6).

A head imitates one target. Answers of a data set were written by somebody else, so
here they are replaced by the target's own: turn by turn in a conversation, behind a
random prefix of a document, or from the start token alone.

Nothing here knows a model: what decodes is given as a function. A text depends on the
run's seed and on its own number alone, never on what is decoded beside it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from eagle_jax.config import SamplingConfig, TreeConfig, require_int32
from eagle_jax.errors import InputError
from eagle_jax.generation.text import encode
from eagle_jax.generation.tokenizer import RefusedError
from eagle_jax.training.conversations import Example
from eagle_jax.training.encode import EncodedExample, encode_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerationConfig:
    """How much is generated, and from what.

    Attributes:
        max_new_tokens: Per answer, at most.
        max_length: Prompt plus output in tokens, at most; `None` for the target's
            positions.
        batch_size: Texts decoded together; changes no text.
        min_prefix: Fewest tokens kept of a document, its start token not counted.
        max_prefix: Most tokens kept of a document, likewise.
        max_malformed: Share of the data's records that may be malformed and left out.
        dtype: As in `DecodingConfig`.
    """

    max_new_tokens: int = 512
    max_length: int | None = None
    batch_size: int = 16
    min_prefix: int = 1
    max_prefix: int = 64
    max_malformed: float = 0.01
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        """Refuses counts out of range."""
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)} must be at least 1")
            require_int32(name, getattr(self, name))
        if self.max_length is not None and self.max_length < 2:
            raise InputError(
                f"max_length = {self.max_length} must be at least 2 (prompt + output)"
            )
        if not 0 <= self.min_prefix <= self.max_prefix:
            raise InputError(
                f"min_prefix = {self.min_prefix} must be 0 to max_prefix = "
                f"{self.max_prefix}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """All settings of `scripts/regenerate.py`, one TOML table per attribute."""

    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    regeneration: RegenerationConfig = dataclasses.field(
        default_factory=RegenerationConfig
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the target wrote behind one prompt.

    Attributes:
        ids: Generated, with the stop token.
        text: What the ids add to the prompt's text.
        is_complete: Whether a stop token ended it, and not a limit.
    """

    ids: list[int]
    text: str
    is_complete: bool


Answerer = Callable[[list[list[int]], list[int]], list[Answer]]
"""Answers prompts, given as ids, each with the seed of its own noise."""


class Task(Protocol):
    """One text in the making."""

    def prompt(self) -> list[int] | None:
        """Returns the ids to be answered next, `None` if there is nothing left."""
        ...

    def add(self, answer: Answer) -> None:
        """Takes the answer to the last prompt."""
        ...

    def record(self) -> dict[str, Any] | None:
        """Returns what is kept, `None` if nothing was answered."""
        ...


class TextTask:
    """A text behind a prompt that is kept as it is: a start token or a prefix."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        """Starts a text.

        Args:
            tokenizer: Of the target.
            prompt: Ids.
        """
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._answer: Answer | None = None

    def prompt(self) -> list[int] | None:
        """Returns the prompt, once."""
        return self._prompt if self._answer is None else None

    def add(self, answer: Answer) -> None:
        """Takes what follows it."""
        self._answer = answer

    def record(self) -> dict[str, Any] | None:
        """Returns `text`, `ids` and a `loss_mask` of what was generated."""
        if self._answer is None:
            return None
        before = self._tokenizer.decode(
            self._prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return {
            "text": before + self._answer.text,
            "ids": self._prompt + self._answer.ids,
            "loss_mask": [0] * len(self._prompt) + [1] * len(self._answer.ids),
        }


class ConversationTask:
    """A conversation of which only the user's turns, and the system's, are kept.

    It ends early with an answer that a limit cut off, as no user ever went on there,
    and before a turn that the chat template refuses.
    """

    def __init__(self, tokenizer: Any, example: Example, refused: list[str]) -> None:
        """Starts a conversation.

        Args:
            tokenizer: Of the target, with a chat template.
            example: With messages.
            refused: Gets a line if the chat template refuses a turn.
        """
        self._tokenizer = tokenizer
        self._refused = refused
        self._where = example.where
        self._waiting = [
            dict(message)
            for message in example.messages
            if message["role"] != "assistant"
        ]
        self._messages: list[dict[str, str]] = []
        self._asked: EncodedExample | None = None
        self._record: dict[str, Any] | None = None

    def prompt(self) -> list[int] | None:
        """Returns the conversation up to the next answer."""
        if not self._waiting:
            return None
        self._messages.append(self._waiting.pop(0))
        if self._messages[-1]["role"] == "system" and self._waiting:
            self._messages.append(self._waiting.pop(0))
        try:
            self._asked = encode_prompt(self._tokenizer, self._messages, self._where)
        except RefusedError as error:
            self._refused.append(str(error))
            return None
        return self._asked.tokens.tolist()

    def add(self, answer: Answer) -> None:
        """Takes an answer."""
        assert self._asked is not None
        # Templates put the space between header and answer themselves.
        turn = {"role": "assistant", "content": answer.text.strip()}
        self._messages.append(turn)
        if not answer.is_complete:
            self._waiting = []
        mask = self._asked.loss_mask.astype(int).tolist()
        self._record = {
            "messages": list(self._messages),
            "ids": self._asked.tokens.tolist() + answer.ids,
            "loss_mask": mask + [1] * len(answer.ids),
        }

    def record(self) -> dict[str, Any] | None:
        """Returns `messages`, and `ids` with the `loss_mask` of all answers.

        The last answer's ids are those that were generated; earlier ones are encoded
        again from their text, as they were when the target read them.
        """
        return self._record


def sample_tasks(tokenizer: Any, count: int) -> Iterator[Task]:
    """Returns texts from the start token alone.

    Args:
        tokenizer: Of the target.
        count: How many.

    Raises:
        InputError: If the tokenizer has no start token.
    """
    start = tokenizer.bos_token_id
    if start is None:
        raise InputError(
            "--samples needs a start token, but the target's tokenizer has none; give "
            "--data FILE"
        )
    return (TextTask(tokenizer, [start]) for _ in range(count))


def example_tasks(
    tokenizer: Any,
    examples: Sequence[Example],
    config: RegenerationConfig,
    seed: int,
    refused: list[str] | None = None,
) -> Iterator[Task]:
    """Yields a text for each example: answers to its turns, or behind its prefix.

    Args:
        tokenizer: Of the target; conversations need a chat template.
        examples: From `read_examples`.
        config: Bounds of the prefix, whose length depends on the seed and on the
            example's number.
        seed: Of the run.
        refused: Gets a line for each conversation that the chat template refuses from
            some turn on.
    """
    refused = [] if refused is None else refused
    for index, example in enumerate(examples):
        if example.messages:
            yield ConversationTask(tokenizer, example, refused)
            continue
        if example.ids is not None:
            ids = example.ids.tolist()
        else:
            ids = encode(tokenizer, example.text or "")
        start = int(ids[0] == tokenizer.bos_token_id)
        length = len(ids) - start
        low, high = min(config.min_prefix, length), min(config.max_prefix, length)
        kept = int(np.random.default_rng((seed, index)).integers(low, high + 1))
        yield TextTask(tokenizer, ids[: max(1, start + kept)])


def regenerate(
    tasks: Iterable[Task],
    answer: Answerer,
    *,
    batch_size: int,
    max_length: int,
    seed: int,
    first: int = 0,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Lets the target write every text, batch by batch and in order.

    Args:
        tasks: The texts; those before `first` are skipped.
        answer: Decodes up to `batch_size` prompts.
        batch_size: Changes no text.
        max_length: Prompt plus output; a prompt that leaves no room ends its text.
        seed: Of the run.
        first: Number of the first text that is still to be written.

    Yields:
        The number of a text and its record, `None` where no prompt had room.
    """
    batch: list[tuple[int, Task]] = []
    for index, task in enumerate(tasks):
        if index < first:
            continue
        batch.append((index, task))
        if len(batch) == batch_size:
            yield from _write_batch(batch, answer, max_length, seed)
            batch = []
    if batch:
        yield from _write_batch(batch, answer, max_length, seed)


def seed_of(seed: int, index: int, turn: int) -> int:
    """Returns the seed of one answer, in 0 to 2**32 - 1.

    Mixed, not added: two runs with neighbouring seeds must share no text.

    Args:
        seed: Of the run.
        index: Of the text.
        turn: Of the answer in it.
    """
    return int(np.random.SeedSequence((seed, index, turn)).generate_state(1)[0])


def _write_batch(
    batch: Sequence[tuple[int, Task]], answer: Answerer, max_length: int, seed: int
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Answers turn after turn, until no text of the batch has another."""
    open_tasks = list(batch)
    turn = 0
    while open_tasks:
        asked: list[tuple[int, Task]] = []
        prompts: list[list[int]] = []
        for index, task in open_tasks:
            prompt = task.prompt()
            if prompt is not None and len(prompt) < max_length:
                asked.append((index, task))
                prompts.append(prompt)
        if prompts:
            seeds = [seed_of(seed, index, turn) for index, _ in asked]
            for (_, task), answered in zip(asked, answer(prompts, seeds), strict=True):
                task.add(answered)
        open_tasks = asked
        turn += 1
    for index, task in batch:
        yield index, task.record()
