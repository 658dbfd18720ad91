"""Texts in the making: what stays of a record, and what the target writes.

A text is a generator. It yields the ids of a prompt and is sent the text that answers
it, `None` where that has no room; it returns the record to keep, `None` if nothing was
answered.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from eagle_jax.decoding.state import StopReason
from eagle_jax.engine import Text
from eagle_jax.engine.wording import RefusedError, encode
from eagle_jax.errors import InputError
from eagle_jax.training.conversations import Example
from eagle_jax.training.encode import encode_prompt

Task = Generator[list[int], Text | None, dict[str, Any] | None]
"""One text in the making."""


def answer_prompt(tokenizer: Any, prompt: list[int]) -> Task:
    """Writes the text after a prompt that is kept as it is.

    Its record has `text`, `ids` and a `loss_mask` of what was generated.

    Args:
        tokenizer: The target's tokenizer.
        prompt: The prompt's ids: a start token, or a document's beginning.
    """
    text = yield prompt
    if text is None:
        return None
    before = tokenizer.decode(
        prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return {
        "text": before + text.text,
        "ids": prompt + text.token_ids,
        "loss_mask": [0] * len(prompt) + [1] * len(text.token_ids),
    }


def answer_turns(tokenizer: Any, example: Example, refused: list[str]) -> Task:
    """Answers a conversation, of which the user's turns and the system's are kept.

    It ends early after an answer that a limit cut off, which no user has replied to,
    and before a turn that the chat template refuses. Its record has `messages`, and
    `ids` with the `loss_mask` of all answers: the last answer's ids are those that were
    generated, earlier ones are encoded from their text, as the target read them.

    Args:
        tokenizer: The target's tokenizer, with a chat template.
        example: An example with messages.
        refused: A list that gets a line if the chat template refuses a turn.
    """
    waiting = [dict(m) for m in example.messages if m["role"] != "assistant"]
    messages: list[dict[str, str]] = []
    record = None
    while waiting:
        messages.append(waiting.pop(0))
        if messages[-1]["role"] == "system" and waiting:
            messages.append(waiting.pop(0))
        try:
            asked = encode_prompt(tokenizer, messages, example.where)
        except RefusedError as error:
            refused.append(str(error))
            break
        prompt = asked.tokens.tolist()
        text = yield prompt
        if text is None:
            break
        # Templates put the space between header and answer themselves.
        answer = text.text.strip()
        messages.append({"role": "assistant", "content": answer})
        mask = asked.loss_mask.astype(int).tolist()
        record = {
            "messages": list(messages),
            "ids": prompt + text.token_ids,
            "loss_mask": mask + [1] * len(text.token_ids),
        }
        if text.stop_reason != StopReason.STOP_TOKEN:
            break
    return record


def sample_tasks(tokenizer: Any, count: int) -> Iterator[Task]:
    """Returns texts from the start token alone.

    Raises:
        InputError: If the tokenizer has no start token.
    """
    start = tokenizer.bos_token_id
    if start is None:
        raise InputError(
            "`samples` needs a start token, but the target's tokenizer has none; give "
            "`data`"
        )
    return (answer_prompt(tokenizer, [start]) for _ in range(count))


def example_tasks(
    tokenizer: Any,
    examples: Sequence[Example],
    prefixes: tuple[int, int],
    seed: int,
    refused: list[str],
) -> Iterator[Task]:
    """Yields a text for each example: answers to its turns, or what follows its prefix.

    Args:
        tokenizer: The target's tokenizer; conversations need a chat template.
        examples: The examples that `read_examples` returned.
        prefixes: The fewest and the most tokens of a prefix, start token not counted;
            its length depends on the seed and on the example's number.
        seed: The run's seed.
        refused: A list that gets a line for each conversation that the chat template
            refuses from some turn on.
    """
    for index, example in enumerate(examples):
        if example.messages:
            yield answer_turns(tokenizer, example, refused)
            continue
        if example.ids is not None:
            ids = example.ids.tolist()
        else:
            ids = encode(tokenizer, example.text or "")
        start = int(ids[0] == tokenizer.bos_token_id)
        length = len(ids) - start
        low, high = (min(bound, length) for bound in prefixes)
        kept = int(np.random.default_rng((seed, index)).integers(low, high + 1))
        yield answer_prompt(tokenizer, ids[: max(1, start + kept)])
