"""Texts by the target itself, the best data to train a head on (EAGLE-1, table 6).

A head imitates one target. Answers of a data set were written by somebody else, so
here they are replaced by the target's own: turn by turn in a conversation, after a
random prefix of a document, or from the start token alone.

A text depends on the run's seed and on its own number alone, never on the texts decoded
beside it, nor on the drafter.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from eagle_jax.checkpoints import check_max_length, resolve
from eagle_jax.config import DecodingConfig
from eagle_jax.decoding.requests import bucket_rows
from eagle_jax.decoding.state import StopReason
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart, fingerprint_file
from eagle_jax.generation import text
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.generation.runner import Runner
from eagle_jax.generation.scheduler import Scheduler
from eagle_jax.progress import Progress, Report, say_nothing, show_nothing
from eagle_jax.training.config import RegenerateConfig
from eagle_jax.training.conversations import check_ids, read_examples
from eagle_jax.training.encode import check_template
from eagle_jax.training.resumable import ResumableLines
from eagle_jax.training.tasks import Answer, Task, example_tasks, sample_tasks


class Answerer(Protocol):
    """Whatever answers prompts, several at once, in any order."""

    @property
    def num_waiting(self) -> int:
        """The prompts that are not begun."""
        ...

    def add(self, key: int, prompt_ids: list[int], seed: int) -> None:
        """Takes a prompt, the number of its text and the seed of its draws."""
        ...

    def step(self) -> Iterable[tuple[int, Answer]]:
        """Goes on, and returns the answers that are complete, with their numbers."""
        ...


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

    def add(self, record: dict[str, Any] | None) -> None:
        """Counts a text's record; `None` stands for a text that was left out."""
        if record is None:
            self.left_out += 1
            return
        self.texts += 1
        self.tokens += sum(record["loss_mask"])

    def __str__(self) -> str:
        """Returns the line that a run ends with."""
        parts = [f"{self.texts} texts", f"{self.tokens} tokens to learn from"]
        if self.left_out:
            parts.append(
                f"{self.left_out} left out: no room for an answer, or refused by the "
                "chat template"
            )
        if self.refused:
            parts.append(
                f"{len(self.refused)} refused from some turn on ({self.refused[0]})"
            )
        return " | ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource:
    """The beginnings of texts: a file of records, or the start token alone.

    Attributes:
        data: The file of conversations or texts, see `read_examples`.
        limit: The number of its records to take; `None` for all.
        samples: The number of texts to write from the start token, instead of `data`.
    """

    data: Path | None = None
    limit: int | None = None
    samples: int | None = None

    def check(self, config: RegenerateConfig) -> None:
        """Refuses a source that gives no texts to learn from.

        Raises:
            InputError: If not exactly one of `data` and `samples` is given, a count
                is below 1, or the settings do not go with them.
        """
        if (self.data is None) == (self.samples is None):
            raise InputError("give either `data` FILE or `samples` N")
        for name in ("samples", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"`{name}` {value} must be at least 1")
        if config.sampling.acceptance != "coupled":
            raise InputError(
                f'acceptance = "{config.sampling.acceptance}" would make the texts '
                'depend on the head; leave it at "coupled"'
            )
        if self.samples is not None and config.sampling.temperature == 0:
            raise InputError(
                "`samples` at temperature 0 would write one text many times; give "
                "temperature 1"
            )


def regenerate_file(
    target: str,
    source: TextSource,
    output: Path,
    config: RegenerateConfig,
    *,
    draft: str | None = None,
    overwrite: bool = False,
    report: Report = say_nothing,
    progress: Progress = show_nothing,
) -> Counts | None:
    """Lets a target write a file of texts, going on where an earlier call stopped.

    Args:
        target: A Hugging Face folder or hub name.
        source: The beginnings of the texts.
        output: A file of JSON lines, see `ResumableLines`.
        config: All settings of the run.
        draft: An EAGLE head, which makes the run quicker and changes no text.
        overwrite: Whether to start the output again.
        report: Called with lines for a log.
        progress: Called to show how far the run is.

    Returns:
        The counts of what this call wrote; `None` if nothing was left to write.

    Raises:
        InputError: If files, settings and models do not fit together, or no text had
            room for an answer.
    """
    source.check(config)
    if source.data is not None:
        check_apart(output, source.data)
    pair = open_pair(
        target,
        draft,
        GenerateConfig(
            tree=config.tree, decoding=DecodingConfig(dtype=config.regeneration.dtype)
        ),
    )
    max_length = config.regeneration.max_length or pair.config.max_positions
    check_max_length(pair.config, max_length)
    new_tokens = config.regeneration.max_new_tokens
    pair.check_memory(batch_size=1, max_length=min(max_length, 1 + new_tokens))
    counts = Counts()
    tasks, total = _tasks(source, config, pair, counts.refused, report)
    settings = _settings(target, source, config, max_length)
    with ResumableLines(output, settings, overwrite=overwrite) as lines:
        first = lines.next_index
        if first:
            report(f"{output}: going on after the first {first} of {total}")
        if first >= total:
            return None
        batch_size = min(config.regeneration.batch_size, bucket_rows(total - first))
        report(f"loading {target}")
        written = regenerate(
            tasks,
            _queue(pair.load(), config, max_length, batch_size),
            ahead=batch_size,
            max_length=max_length,
            seed=config.sampling.seed,
            first=first,
        )
        with progress("regenerating", total, first) as update:
            for index, record in written:
                if record is not None:
                    lines.append({"index": index} | record)
                counts.add(record)
                update(index + 1)
    if not counts.texts and not first:
        raise InputError(
            f"none of {total} prompts left room for an answer in max_length = "
            f"{max_length}, or the chat template refused them; give shorter ones or "
            f"raise `max_length` ({counts})"
        )
    return counts


def regenerate(
    tasks: Iterable[Task],
    answerer: Answerer,
    *,
    ahead: int,
    max_length: int,
    seed: int,
    first: int = 0,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Lets the target write every text; a text is begun when another has ended.

    Args:
        tasks: The texts; those before `first` are skipped.
        answerer: What answers prompts.
        ahead: The prompts that wait, so that no row of the answerer is without work;
            it changes no text.
        max_length: The largest number of tokens of prompt and output; a prompt that
            leaves no room ends its text.
        seed: The run's seed.
        first: The number of the first text that is still to be written.

    Yields:
        The number of a text and its record, in order; `None` where no prompt had room.
    """
    waiting = itertools.islice(enumerate(tasks), first, None)
    asked: dict[int, tuple[Task, int]] = {}
    done: dict[int, Task] = {}

    def ask(index: int, task: Task, turn: int) -> None:
        prompt = task.prompt()
        if prompt is None or len(prompt) >= max_length:
            done[index] = task
            return
        asked[index] = task, turn
        answerer.add(index, prompt, seed_of(seed, index, turn))

    while True:
        while answerer.num_waiting < ahead and (begun := next(waiting, None)):
            ask(*begun, turn=0)
        while first in done:
            yield first, done.pop(first).record()
            first += 1
        if not asked:
            return
        for index, answer in answerer.step():
            task, turn = asked.pop(index)
            task.add(answer)
            ask(index, task, turn + 1)


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
    source: TextSource,
    config: RegenerateConfig,
    pair: PairSource,
    refused: list[str],
    report: Report,
) -> tuple[Iterable[Task], int]:
    """Returns the texts to write, and their number."""
    settings, tokenizer = config.regeneration, pair.tokenizer
    if source.samples is not None:
        return sample_tasks(tokenizer, source.samples), source.samples
    assert source.data is not None
    found = read_examples(
        source.data, max_malformed=settings.max_malformed, need_answers=False
    )
    report(f"{source.data}: {found.summary()}")
    examples = found.examples[: source.limit]
    if any(example.messages for example in examples):
        check_template(tokenizer)
    for example in examples:
        if not example.messages:
            check_ids(example.where, example.ids, pair.config.vocab_size)
    tasks = example_tasks(tokenizer, examples, settings, config.sampling.seed, refused)
    return tasks, len(examples)


def _settings(
    target: str,
    source: TextSource,
    config: RegenerateConfig,
    max_length: int,
) -> dict[str, Any]:
    """Returns all settings that the texts depend on, so neither batch nor drafter."""
    data, dtype = source.data, config.regeneration.dtype
    settings = {
        "target": str(resolve(target).resolve()),
        "data": "samples" if data is None else fingerprint_file(data),
    }
    settings |= dataclasses.asdict(config.sampling)
    settings |= dataclasses.asdict(config.regeneration) | {
        "max_length": max_length,
        "dtype": f"auto on {jax.default_backend()}" if dtype == "auto" else dtype,
    }
    del settings["batch_size"]
    return settings


class _Queue:
    """A pair's scheduler as an `Answerer`."""

    def __init__(self, pair: LoadedPair, scheduler: Scheduler) -> None:
        self._tokenizer = pair.tokenizer
        self._scheduler = scheduler

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def add(self, key: int, prompt_ids: list[int], seed: int) -> None:
        self._scheduler.add(key, prompt_ids, seed)

    def step(self) -> Iterator[tuple[int, Answer]]:
        for served in self._scheduler.step():
            row = served.row
            added = text.continuation(
                self._tokenizer, row.prompt_ids, row.generated_ids
            )
            is_complete = row.stop_reason == StopReason.STOP_TOKEN
            answer = Answer(ids=row.generated_ids, text=added, is_complete=is_complete)
            yield served.key, answer


def _queue(
    pair: LoadedPair, config: RegenerateConfig, max_length: int, batch_size: int
) -> _Queue:
    """Returns what lets a pair answer prompts."""
    new_tokens = config.regeneration.max_new_tokens
    runner = Runner(
        pair=pair,
        drafter=pair.drafter,
        config=GenerateConfig(
            tree=config.tree,
            sampling=config.sampling,
            decoding=DecodingConfig(max_new_tokens=new_tokens),
        ),
        max_length=max_length,
        prompt_bucket=0,
        batch_size=batch_size,
    )
    return _Queue(pair, Scheduler(runner))
