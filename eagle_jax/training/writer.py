"""The texts of `regenerate`, each a task of one answer or several.

A text depends on the run's seed and on its own number alone, never on the texts decoded
beside it, nor on the drafter.
"""

import dataclasses
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from eagle_jax.decoding.state import StopReason
from eagle_jax.engine import Pair, Text
from eagle_jax.engine.wording import RefusedError, encode
from eagle_jax.errors import InputError
from eagle_jax.training.conversations import Example
from eagle_jax.training.encode import encode_chat
from eagle_jax.training.questions import opening

Record = dict[str, Any]
"""A text that was written, as a line of the output has it."""

Task = Generator[Text, Any, Record | None]
"""A text in the making: it yields each answer that is to be written, and goes on once
that has ended. It returns the record to keep, `None` if nothing was answered.
"""


def seed_of(seed: int, index: int, turn: int) -> int:
    """Returns the seed of one answer, in 0 to 2**32 - 1.

    The run's seed and the numbers of the text and of the answer in it are mixed, not
    added: two runs with neighbouring seeds must share no text.
    """
    return int(np.random.SeedSequence((seed, index, turn)).generate_state(1)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """What makes the texts of a run.

    Attributes:
        pair: What writes; conversations need its chat template.
        seed: The run's seed.
        max_length: The most tokens of a prompt and its text together; a prompt that
            leaves no room ends its text.
        refused: The list that gets a line for each conversation that the chat template
            refuses from some turn on.
    """

    pair: Pair
    seed: int
    max_length: int
    refused: list[str] = dataclasses.field(default_factory=list)

    def samples(self, count: int) -> Iterator[Task]:
        """Returns texts from the start token alone.

        Raises:
            InputError: If the tokenizer has no start token.
        """
        start = self.pair.tokenizer.bos_token_id
        if start is None:
            raise InputError(
                "`samples` needs a start token, but the target's tokenizer has none; "
                "give `data`"
            )
        return (self._go_on([start], index) for index in range(count))

    def questions(self, count: int, systems: Sequence[str]) -> Iterator[Task]:
        """Returns questions, each after what one of the systems says."""
        asked = [(opening(self.pair.tokenizer, system), system) for system in systems]
        in_turn = itertools.islice(itertools.cycle(asked), count)
        return (self._question(*one, index) for index, one in enumerate(in_turn))

    def continued(
        self, examples: Sequence[Example], prefixes: tuple[int, int]
    ) -> Iterator[Task]:
        """Yields a text for each example: its answered turns, or what follows a prefix.

        Args:
            examples: The examples that `read_examples` returned.
            prefixes: The fewest and the most tokens of a prefix, start token not
                counted; its length depends on the seed and on the example's number.
        """
        tokenizer = self.pair.tokenizer
        for index, example in enumerate(examples):
            if example.messages:
                yield self._answer_turns(example, index)
                continue
            if example.ids is not None:
                ids = example.ids.tolist()
            else:
                ids = encode(tokenizer, example.text or "")
            start = int(ids[0] == tokenizer.bos_token_id)
            length = len(ids) - start
            low, high = (min(bound, length) for bound in prefixes)
            drawn = np.random.default_rng((self.seed, index)).integers(low, high + 1)
            yield self._go_on(ids[: max(1, start + int(drawn))], index)

    def _ask(self, prompt: list[int], index: int, turn: int = 0) -> Text | None:
        """Returns the text after a prompt, `None` where there is no room."""
        if len(prompt) >= self.max_length:
            return None
        request = self.pair.request(seed=seed_of(self.seed, index, turn))
        return self.pair.text(prompt, request)

    def _question(self, prompt: list[int], system: str, index: int) -> Task:
        """Writes what a user might say after a chat template's opening.

        Its record has the `messages` of a conversation that nobody has answered, and a
        `loss_mask` that counts what was written.
        """
        if (question := self._ask(prompt, index)) is None:
            return None
        yield question
        if question.stop_reason != StopReason.STOP_TOKEN:
            return None
        said = [{"role": "system", "content": system}] if system else []
        return {
            "messages": [*said, {"role": "user", "content": question.text.strip()}],
            "loss_mask": [1] * len(question.token_ids),
        }

    def _go_on(self, prompt: list[int], index: int) -> Task:
        """Writes the text after a start token, or after a document's beginning.

        Its record has `text`, `ids` and a `loss_mask` of what was generated.
        """
        if (answer := self._ask(prompt, index)) is None:
            return None
        yield answer
        before = self.pair.tokenizer.decode(
            prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return {
            "text": before + answer.text,
            "ids": prompt + answer.token_ids,
            "loss_mask": [0] * len(prompt) + [1] * len(answer.token_ids),
        }

    def _answer_turns(self, example: Example, index: int) -> Task:
        """Answers a conversation, of which the user's turns and the system's are kept.

        It ends early after an answer that a limit cut off, which no user has replied
        to, and before a turn that the chat template refuses. Its record has `messages`,
        and `ids` with the `loss_mask` of all answers: the last answer's ids are those
        that were generated, earlier ones are encoded from their text, as the target
        read them.
        """
        waiting = [dict(m) for m in example.messages if m["role"] != "assistant"]
        messages: list[dict[str, str]] = []
        record, turn = None, 0
        while waiting:
            messages.append(waiting.pop(0))
            if messages[-1]["role"] == "system" and waiting:
                messages.append(waiting.pop(0))
            try:
                asked = encode_chat(
                    self.pair.tokenizer, messages, example.where, is_prompt=True
                )
            except RefusedError as error:
                self.refused.append(str(error))
                break
            answer = self._ask(asked.tokens.tolist(), index, turn)
            if answer is None:
                break
            yield answer
            # Templates put the space between header and answer themselves.
            messages.append({"role": "assistant", "content": answer.text.strip()})
            mask = asked.loss_mask.astype(int).tolist()
            record = {
                "messages": list(messages),
                "ids": answer.prompt_ids + answer.token_ids,
                "loss_mask": mask + [1] * len(answer.token_ids),
            }
            turn += 1
            if answer.stop_reason != StopReason.STOP_TOKEN:
                break
        return record
