"""Texts by the target itself, the best data to train a head on (EAGLE-1, table 6).

A head imitates one target. Answers of a data set were written by somebody else, so
here they are replaced by the target's own: turn by turn in a conversation, after a
random prefix of a document, or from the start token alone. Where there are no questions
the target writes those, too: see `questions`.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints import check_max_length, resolve
from eagle_jax.config import require, require_counts
from eagle_jax.decoding.requests import bucket_rows
from eagle_jax.engine import Pair, PairConfig
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
from eagle_jax.training.questions import Questions, read_systems
from eagle_jax.training.writer import Record, Task, Writer

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
        questions: The number of questions to write as a user would, instead of `data`;
            what is no question, or there already, is left out.
        systems: A file of what the system says before them, see `read_systems`; `None`
            for what the chat template says.
        draft: An EAGLE head, which makes the run quicker and changes no text.
        overwrite: Whether to start the output again.
    """

    target: str
    output: Path
    data: Path | None = None
    min_prefix: int = 1
    max_prefix: int = 64
    samples: int | None = None
    questions: int | None = None
    systems: Path | None = None
    draft: str | None = None
    overwrite: bool = False

    def check(self, config: PairConfig) -> None:
        """Refuses a job that gives no texts to learn from."""
        sources = (self.data, self.samples, self.questions)
        if sum(one is not None for one in sources) != 1:
            raise InputError(
                "give either `data` FILE or `samples` N, or `questions` N alone"
            )
        counts = ("samples", "questions")
        given = [name for name in counts if getattr(self, name) is not None]
        require_counts(self, **dict.fromkeys(given, 1))
        if self.systems is not None and self.questions is None:
            raise InputError("`systems` is for `questions` alone")
        is_between = 0 <= self.min_prefix <= self.max_prefix
        bounds = f"0 to max_prefix = {self.max_prefix}"
        require(is_between, "min_prefix", self.min_prefix, bounds)
        if config.acceptance != "coupled":
            raise InputError(
                'the texts would depend on the head; leave acceptance at "coupled"'
            )
        if self.data is None and config.request.temperature == 0:
            raise InputError("one text would be written many times at temperature 0")
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
        questions = Questions(_questions_in(output) if job.questions else ())
        if first:
            report(f"{output}: going on after the first {first} of {total}")
        if first >= total:
            return None
        batch_size = min(config.batch_size, bucket_rows(total - first))
        report(f"loading {job.target}")
        engine = pair.engine(batch_size=batch_size, max_length=max_length)
        left = itertools.islice(tasks, first, None)
        written = converse(engine, left, ahead=batch_size)
        counts, begun = Counts(refused=writer.refused), time.monotonic()
        with progress("regenerating", total, first) as update:
            for index, record in _in_order(written, first):
                if record and job.questions:
                    is_kept = questions.keep(record["messages"][-1]["content"])
                    record = record if is_kept else None
                if record is None:
                    counts.left_out += 1
                else:
                    lines.append({"index": index} | record)
                    counts.texts += 1
                    counts.tokens += sum(record["loss_mask"])
                rate = counts.tokens / (time.monotonic() - begun)
                update(index + 1, f"{counts.tokens} tokens, {rate:.0f} tokens/s")
    if counts.texts or first:
        return counts
    if job.questions:
        raise InputError(
            f"none of {total} was a question: each was cut off, too short, a loop or "
            "there already; raise `max_new_tokens`, or give other `systems`"
        )
    raise InputError(
        f"none of {total} prompts left room for an answer in max_length = "
        f"{max_length}, or the chat template refused them; give shorter ones or "
        f"raise `max_length` ({counts})"
    )


def _questions_in(output: Path) -> Iterator[str]:
    """Yields the questions that a file of them holds already."""
    for where, line in itertools.islice(read_log(output), 1, None):
        messages = check_type(
            list, value_at(parse_json(line, where), "messages"), f"{where}: messages"
        )
        yield value_at(messages[-1], "content")


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


def _tasks(
    job: RegenerateJob, writer: Writer, report: Report
) -> tuple[Iterator[Task], int]:
    """Returns the texts to write, and their number."""
    if job.samples is not None:
        return writer.samples(job.samples), job.samples
    if job.questions is not None:
        check_template(writer.pair.tokenizer)
        systems = [""] if job.systems is None else read_systems(job.systems)
        return writer.questions(job.questions, systems), job.questions
    assert job.data is not None
    found = read_examples(job.data, need_answers=False)
    report(f"{job.data}: {found.summary()}")
    examples = found.examples
    if any(example.messages for example in examples):
        check_template(writer.pair.tokenizer)
    for example in examples:
        if not example.messages:
            check_ids(example.where, example.ids, writer.pair.vocab_size)
    return writer.continued(examples, (job.min_prefix, job.max_prefix)), len(examples)


def _settings(
    job: RegenerateJob, config: PairConfig, pair: Pair, max_length: int
) -> dict[str, Any]:
    """Returns all settings that the texts depend on, so neither batch nor drafter."""
    every = vars(config) | vars(config.request)
    found = {name: every[name] for name in _RECORDED.split()} | {
        "min_prefix": job.min_prefix,
        "max_prefix": job.max_prefix,
        "target": str(resolve(job.target).resolve()),
        "data": "samples" if job.data is None else fingerprint(job.data),
        "max_length": max_length,
        "dtype": pair.dtype,
    }
    if job.questions is not None:
        systems = None if job.systems is None else fingerprint(job.systems)
        found |= {"data": "questions", "systems": systems}
    return found


def next_index(output: Path) -> int:
    """Returns the number of the first text that a file lacks."""
    where, line = collections.deque(read_log(output), maxlen=1)[0]
    record = parse_json(line, where)
    if value_at(record, "run") is not None:
        return 0
    return check_type(int, value_at(record, "index"), f"{where}: index") + 1
