"""Texts in the making: the parts of a record that stay, and the target's answers."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.generation.text import encode
from eagle_jax.generation.tokenizer import RefusedError
from eagle_jax.training.config import RegenerationConfig
from eagle_jax.training.conversations import Example
from eagle_jax.training.encode import EncodedExample, encode_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The target's answer to one prompt.

    Attributes:
        ids: The generated ids, with the stop token.
        text: The text that the ids add to the prompt's.
        is_complete: Whether a stop token ended the answer, and not a limit.
    """

    ids: list[int]
    text: str
    is_complete: bool


class Task(Protocol):
    """One text in the making."""

    def prompt(self) -> list[int] | None:
        """Returns the ids to be answered next, `None` if none are left."""
        ...

    def add(self, answer: Answer) -> None:
        """Takes the answer to the last prompt."""
        ...

    def record(self) -> dict[str, Any] | None:
        """Returns the record to keep, `None` if nothing was answered."""
        ...


class TextTask:
    """A text after a prompt that is kept as it is: a start token or a prefix."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        """Starts a text.

        Args:
            tokenizer: The target's tokenizer.
            prompt: The prompt's ids.
        """
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._answer: Answer | None = None

    def prompt(self) -> list[int] | None:
        """Returns the prompt, once."""
        return self._prompt if self._answer is None else None

    def add(self, answer: Answer) -> None:
        """Takes the text that follows the prompt."""
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

    It ends early after an answer that a limit cut off, which no user has replied to,
    and before a turn that the chat template refuses.
    """

    def __init__(self, tokenizer: Any, example: Example, refused: list[str]) -> None:
        """Starts a conversation.

        Args:
            tokenizer: The target's tokenizer, with a chat template.
            example: An example with messages.
            refused: A list that gets a line if the chat template refuses a turn.
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
        """Takes the answer to the last prompt; one that is cut off is the last."""
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
        tokenizer: The target's tokenizer.
        count: The number of texts.

    Raises:
        InputError: If the tokenizer has no start token.
    """
    start = tokenizer.bos_token_id
    if start is None:
        raise InputError(
            "`samples` needs a start token, but the target's tokenizer has none; give "
            "`data`"
        )
    return (TextTask(tokenizer, [start]) for _ in range(count))


def example_tasks(
    tokenizer: Any,
    examples: Sequence[Example],
    config: RegenerationConfig,
    seed: int,
    refused: list[str] | None = None,
) -> Iterator[Task]:
    """Yields a text for each example: answers to its turns, or what follows its prefix.

    Args:
        tokenizer: The target's tokenizer; conversations need a chat template.
        examples: The examples that `read_examples` returned.
        config: The settings, of which the bounds of the prefix are read; its length
            depends on the seed and on the example's number.
        seed: The run's seed.
        refused: A list that gets a line for each conversation that the chat template
            refuses from some turn on.
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
