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
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints import check_max_length, resolve
from eagle_jax.config import require
from eagle_jax.decoding.requests import bucket_rows
from eagle_jax.engine import Engine, Pair, PairConfig, Text
from eagle_jax.engine.calls import check_memory
from eagle_jax.engine.converse import converse
from eagle_jax.engine.open import open_pair
from eagle_jax.errors import InputError
from eagle_jax.files import check_apart
from eagle_jax.logs import JsonLines, read_log
from eagle_jax.parsing import check_type, parse_json, value_at
from eagle_jax.reporting import Progress, Report, say_nothing, show_nothing
from eagle_jax.training.conversations import check_ids, fingerprint, read_examples
from eagle_jax.training.encode import check_template
from eagle_jax.training.tasks import Task, example_tasks, sample_tasks

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
    check_max_length(pair.sizes, max_length)
    least = min(max_length, 1 + request.max_new_tokens)
    check_memory(pair, batch_size=1, max_length=least)
    counts = Counts()
    tasks, total = _tasks(job, config, pair, counts.refused, report)
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
        written = regenerate(tasks, engine, seed=request.seed, first=first)
        with progress("regenerating", total, first) as update:
            for index, record in written:
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


def regenerate(
    tasks: Iterable[Task], engine: Engine, *, seed: int, first: int = 0
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Lets the target write every text; a text is begun when another has ended.

    Args:
        tasks: The texts; those before `first` are skipped.
        engine: What answers prompts; one that leaves no room ends its text.
        seed: The run's seed.
        first: The number of the first text that is still to be written.

    Yields:
        The number of a text and its record, in order; `None` where no prompt had room.
    """
    left = itertools.islice(enumerate(tasks), first, None)
    asked = (_ask(task, engine, seed, index) for index, task in left)
    done, shown = dict[int, dict[str, Any] | None](), first
    for number, record in converse(engine, asked, ahead=engine.batch_size):
        done[first + number] = record
        while shown in done:
            yield shown, done.pop(shown)
            shown += 1


def _ask(
    task: Task, engine: Engine, seed: int, index: int
) -> Generator[Text, Text, dict[str, Any] | None]:
    """Writes one text, whose turns draw with seeds of their own."""
    answer, pair = None, engine.pair
    try:
        for turn in itertools.count():
            prompt = task.send(answer)
            if len(prompt) >= engine.max_length:
                task.send(None)  # It has no room, and ends.
            own = pair.request(seed=seed_of(seed, index, turn))
            answer = yield pair.text(prompt, own)
    except StopIteration as end:
        return end.value


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
    job: RegenerateJob,
    config: PairConfig,
    pair: Pair,
    refused: list[str],
    report: Report,
) -> tuple[Iterable[Task], int]:
    """Returns the texts to write, and their number."""
    tokenizer = pair.tokenizer
    if job.samples is not None:
        return sample_tasks(tokenizer, job.samples), job.samples
    assert job.data is not None
    found = read_examples(job.data, need_answers=False)
    report(f"{job.data}: {found.summary()}")
    examples = found.examples
    if any(example.messages for example in examples):
        check_template(tokenizer)
    for example in examples:
        if not example.messages:
            check_ids(example.where, example.ids, pair.vocab_size)
    prefixes = (job.min_prefix, job.max_prefix)
    tasks = example_tasks(tokenizer, examples, prefixes, config.request.seed, refused)
    return tasks, len(examples)


def _settings(
    job: RegenerateJob, config: PairConfig, pair: Pair, max_length: int
) -> dict[str, Any]:
    """Returns all settings that the texts depend on, so neither batch nor drafter."""
    every = vars(config) | vars(config.request)
    settings = {name: every[name] for name in _RECORDED.split()} | {
        "min_prefix": job.min_prefix,
        "max_prefix": job.max_prefix,
        "target": str(resolve(job.target).resolve()),
        "data": "samples" if job.data is None else fingerprint(job.data),
        "max_length": max_length,
        "dtype": pair.dtype,
    }
    return settings


def next_index(output: Path) -> int:
    """Returns the number of the first text that a file lacks."""
    where, line = collections.deque(read_log(output), maxlen=1)[0]
    record = parse_json(line, where)
    if value_at(record, "run") is not None:
        return 0
    return check_type(int, value_at(record, "index"), f"{where}: index") + 1
