"""Texts by the target itself, the best data to train a head on (EAGLE-1, table 6).

A head imitates one target. Answers of a data set were written by somebody else, so
here they are replaced by the target's own: turn by turn in a conversation, after a
random prefix of a document, or from the start token alone.

A text depends on the run's seed and on its own number alone, never on the texts decoded
beside it, nor on the drafter.
"""

import collections
import dataclasses
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints import check_max_length, resolve
from eagle_jax.config import require
from eagle_jax.decoding.requests import bucket_rows
from eagle_jax.decoding.state import StopReason
from eagle_jax.engine import Pair, PairConfig, Text
from eagle_jax.engine.calls import check_memory
from eagle_jax.engine.converse import converse
from eagle_jax.engine.open import open_pair
from eagle_jax.engine.wording import RefusedError, encode
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart
from eagle_jax.logs import JsonLines, read_log
from eagle_jax.parsing import check_type, parse_json, value_at
from eagle_jax.reporting import Progress, Report, say_nothing, show_nothing
from eagle_jax.training.conversations import (
    Example,
    check_ids,
    fingerprint,
    read_examples,
)
from eagle_jax.training.encode import check_template, encode_prompt

Record = dict[str, Any]
"""A text that was written, as a line of the output has it."""

Task = Generator[Text, Any, Record | None]
"""A text in the making: it yields each answer that is to be written, and goes on once
that has ended. It returns the record to keep, `None` if nothing was answered.
"""

_RECORDED = """temperature top_p top_k min_p seed acceptance max_new_tokens max_length
    dtype quantization ignore_eos"""
"""The settings that texts depend on, in the order of the file's first line."""


@dataclasses.dataclass(kw_only=True)
class Counts:
    """The counts of a run's texts.

    Attributes:
        texts: The number of texts that were written.
        tokens: The number of generated tokens, which a head learns from.
        left_out: The number of texts left out, as they have no answer.
        refused: A line for each conversation that was cut at a turn that the chat
            template refuses.
    """

    texts: int = 0
    tokens: int = 0
    left_out: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        """Returns the line that a run ends with."""
        line = f"{self.texts} texts | {self.tokens} tokens to learn from"
        if self.left_out:
            line += f" | {self.left_out} left out, without an answer"
        if self.refused:
            count, first = len(self.refused), self.refused[0]
            line += f" | {count} refused from some turn on ({first})"
        return line


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateJob:
    """What a run reads and writes: texts after a file's records, or a start token.

    Attributes:
        target: A Hugging Face folder or hub name.
        output: A file of JSON lines, see `JsonLines`, which a later run goes on with.
        data: The file of conversations or texts, see `read_examples`.
        min_prefix: The fewest tokens kept of a document, its start token not counted.
        max_prefix: The most tokens kept of a document, its start token not counted.
        samples: The number of texts to write from the start token, instead of `data`.
        draft: An EAGLE head, which makes the run quicker and changes no text.
        overwrite: Whether to start the output again.
    """

    target: str
    output: Path
    data: Path | None = None
    min_prefix: int = 1
    max_prefix: int = 64
    samples: int | None = None
    draft: str | None = None
    overwrite: bool = False

    def check(self, config: PairConfig) -> None:
        """Refuses a job that gives no texts to learn from."""
        if (self.data is None) == (self.samples is None):
            raise InputError("give either `data` FILE or `samples` N")
        if self.samples is not None:
            require(self.samples >= 1, "samples", self.samples, "at least 1")
        is_between = 0 <= self.min_prefix <= self.max_prefix
        bounds = f"0 to max_prefix = {self.max_prefix}"
        require(is_between, "min_prefix", self.min_prefix, bounds)
        if config.acceptance != "coupled":
            raise InputError(
                'the texts would depend on the head; leave acceptance at "coupled"'
            )
        if self.samples is not None and config.request.temperature == 0:
            raise InputError(
                "`samples` would write one text many times at temperature 0"
            )
        if self.data is not None:
            check_apart(self.output, self.data)


def regenerate_file(
    job: RegenerateJob,
    config: PairConfig,
    *,
    report: Report = say_nothing,
    progress: Progress = show_nothing,
) -> Counts | None:
    """Lets a target write a file of texts, going on where an earlier call stopped.

    Args:
        job: What is read and written.
        config: The settings of the texts, with a method that `draft` is for.
        report: Called with lines for a log.
        progress: Called to show how far the run is.

    Returns:
        The counts of what this call wrote; `None` if nothing was left to write.

    Raises:
        InputError: If files, settings and models do not fit together, or no text had
            room for an answer.
    """
    job.check(config)
    request, output = config.request, job.output
    pair = open_pair(job.target, job.draft, config)
    max_length = config.max_length or pair.max_positions
    check_max_length(pair.max_positions, max_length)
    least = min(max_length, 1 + request.max_new_tokens)
    check_memory(pair, batch_size=1, max_length=least)
    writer = Writer(pair=pair, seed=request.seed, max_length=max_length)
    tasks, total = _tasks(job, writer, report)
    settings = _settings(job, config, pair, max_length)
    with JsonLines(output, settings, overwrite=job.overwrite) as lines:
        first = next_index(output)
        if first:
            report(f"{output}: going on after the first {first} of {total}")
        if first >= total:
            return None
        batch_size = min(config.batch_size, bucket_rows(total - first))
        report(f"loading {job.target}")
        engine = pair.engine(batch_size=batch_size, max_length=max_length)
        left = itertools.islice(tasks, first, None)
        written = converse(engine, left, ahead=batch_size)
        counts = Counts(refused=writer.refused)
        with progress("regenerating", total, first) as update:
            for index, record in _in_order(written, first):
                if record is None:
                    counts.left_out += 1
                else:
                    lines.append({"index": index} | record)
                    counts.texts += 1
                    counts.tokens += sum(record["loss_mask"])
                update(index + 1)
    if not counts.texts and not first:
        raise InputError(
            f"none of {total} prompts left room for an answer in max_length = "
            f"{max_length}, or the chat template refused them; give shorter ones or "
            f"raise `max_length` ({counts})"
        )
    return counts


def _in_order(
    written: Iterable[tuple[int, Record | None]], first: int
) -> Iterator[tuple[int, Record | None]]:
    """Yields the records of texts in the order of their numbers, from `first` on."""
    done, shown = dict[int, Record | None](), first
    for number, record in written:
        done[first + number] = record
        while shown in done:
            yield shown, done.pop(shown)
            shown += 1


def seed_of(seed: int, index: int, turn: int) -> int:
    """Returns the seed of one answer, in 0 to 2**32 - 1.

    The numbers are mixed, not added: two runs with neighbouring seeds must share no
    text.

    Args:
        seed: The run's seed.
        index: The text's number.
        turn: The number of the answer in the text.
    """
    return int(np.random.SeedSequence((seed, index, turn)).generate_state(1)[0])


def _tasks(
    job: RegenerateJob, writer: "Writer", report: Report
) -> tuple[Iterator[Task], int]:
    """Returns the texts to write, and their number."""
    if job.samples is not None:
        return writer.samples(job.samples), job.samples
    assert job.data is not None
    found = read_examples(job.data, need_answers=False)
    report(f"{job.data}: {found.summary()}")
    examples = found.examples
    if any(example.messages for example in examples):
        check_template(writer.pair.tokenizer)
    for example in examples:
        if not example.messages:
            check_ids(example.where, example.ids, writer.pair.vocab_size)
    prefixes = (job.min_prefix, job.max_prefix)
    return writer.continued(examples, prefixes), len(examples)


def _settings(
    job: RegenerateJob, config: PairConfig, pair: Pair, max_length: int
) -> dict[str, Any]:
    """Returns all settings that the texts depend on, so neither batch nor drafter."""
    every = vars(config) | vars(config.request)
    return {name: every[name] for name in _RECORDED.split()} | {
        "min_prefix": job.min_prefix,
        "max_prefix": job.max_prefix,
        "target": str(resolve(job.target).resolve()),
        "data": "samples" if job.data is None else fingerprint(job.data),
        "max_length": max_length,
        "dtype": pair.dtype,
    }


def next_index(output: Path) -> int:
    """Returns the number of the first text that a file lacks."""
    where, line = collections.deque(read_log(output), maxlen=1)[0]
    record = parse_json(line, where)
    if value_at(record, "run") is not None:
        return 0
    return check_type(int, value_at(record, "index"), f"{where}: index") + 1


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
            kept = int(
                np.random.default_rng((self.seed, index)).integers(low, high + 1)
            )
            yield self._go_on(ids[: max(1, start + kept)], index)

    def _ask(self, prompt: list[int], index: int, turn: int = 0) -> Text | None:
        """Returns the text after a prompt, `None` where there is no room."""
        if len(prompt) >= self.max_length:
            return None
        request = self.pair.request(seed=seed_of(self.seed, index, turn))
        return self.pair.text(prompt, request)

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
                asked = encode_prompt(self.pair.tokenizer, messages, example.where)
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
