"""Training data by the target itself (EAGLE-1, table 6).

    eagle-jax regenerate --target FOLDER --data FILE --output out.jsonl
    eagle-jax regenerate --target FOLDER --samples 8000 --temperature 1 \
        --output out.jsonl

Answers of the data are replaced by the target's own; `--samples` writes texts from
the start token alone. With `--draft` the target decodes speculatively: the same texts,
sooner. The same command, run again, goes on where it was stopped.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from eagle_jax.checkpoints import check_max_length, fingerprint_folder, resolve
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.config import DecodingConfig, GenerateConfig
from eagle_jax.decoding.requests import bucket_prompt, bucket_rows
from eagle_jax.decoding.state import StopReason
from eagle_jax.errors import InputError
from eagle_jax.files import fingerprint_file
from eagle_jax.generation import text
from eagle_jax.generation.pairs import LoadedPair, PairSource, open_pair
from eagle_jax.generation.runner import Runner
from eagle_jax.training.conversations import check_ids, read_examples
from eagle_jax.training.encode import check_template
from eagle_jax.training.regenerate import (
    Answer,
    RegenerateConfig,
    Task,
    example_tasks,
    regenerate,
    sample_tasks,
)
from eagle_jax.training.resumable import ResumableLines, made_with


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def run() -> int:
        arguments = _parse(argv)
        config = join_settings(RegenerateConfig, arguments.config, arguments)
        return _run(arguments, config)

    return run_command(
        run, interrupted="interrupted; the same command goes on from here"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Let a target rewrite the answers of its training data."
    )
    add = parser.add_argument
    add("--config", type=Path, help="settings from a TOML file; flags win")
    add("--target", required=True, help="target: a Hugging Face folder or hub name")
    add("--draft", help="EAGLE head that makes it quicker")
    add("--data", type=Path, help="conversations or texts, see the README")
    add("--samples", type=int, help="without data: texts from the start token alone")
    add("--output", type=Path, required=True, help="JSON lines; gone on with if there")
    add("--overwrite", action="store_true", help="start the output again")
    add("--limit", type=int, help="take this many records of the data")
    add_settings(
        parser,
        RegenerateConfig,
        *("max_new_tokens", "max_length", "batch_size", "min_prefix", "max_prefix"),
        *("max_malformed", "dtype", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("num_nodes", "depth", "width"),
    )
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace, config: RegenerateConfig) -> int:
    _check(arguments, config)
    before = {} if arguments.overwrite else made_with(arguments.output)
    source = open_pair(
        arguments.target,
        arguments.draft,
        tree=config.tree,
        dtype=config.regeneration.dtype,
        date=before.get("date"),
    )
    max_length = config.regeneration.max_length or source.config.max_positions
    check_max_length(source.config, max_length)
    new_tokens = config.regeneration.max_new_tokens
    source.check_room(batch_size=1, max_length=min(max_length, 1 + new_tokens))
    counts = _Counts()
    tasks, total = _tasks(arguments, config, source, counts.refused)
    settings = _settings(arguments, config, max_length, source.date)
    with ResumableLines(
        arguments.output, settings, overwrite=arguments.overwrite
    ) as lines:
        first = lines.next_index
        if first:
            say(f"{arguments.output}: going on after the first {first} of {total}")
        if first >= total:
            print(f"{arguments.output} | complete")
            return 0
        batch_size = min(config.regeneration.batch_size, bucket_rows(total - first))
        say(f"loading {arguments.target}")
        answerer = _Answerer(source.load(), config, max_length, batch_size)
        with progress("regenerating", total, first) as update:
            for index, record in regenerate(
                tasks,
                answerer,
                batch_size=batch_size,
                max_length=max_length,
                seed=config.sampling.seed,
                first=first,
            ):
                if record is not None:
                    lines.append({"index": index} | record)
                counts.add(record)
                update(index + 1)
    if not counts.texts and not first:
        raise InputError(
            f"none of {total} prompts left room for an answer in max_length = "
            f"{max_length}, or the chat template refused them; give shorter ones or "
            f"raise --max-length ({counts})"
        )
    print(f"{arguments.output} | {counts}")
    return 0


def _check(arguments: argparse.Namespace, config: RegenerateConfig) -> None:
    """Refuses flags that do not go together, before any long work starts."""
    check_writable(arguments.output)
    if (arguments.data is None) == (arguments.samples is None):
        raise InputError("give either --data FILE or --samples N")
    for name in ("samples", "limit"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be at least 1")
    if config.sampling.acceptance != "coupled":
        raise InputError(
            f'acceptance = "{config.sampling.acceptance}" would make the texts depend '
            'on the head; leave it at "coupled"'
        )
    if arguments.samples is not None and config.sampling.temperature == 0:
        raise InputError(
            "--samples at temperature 0 would write one text many times; give "
            "--temperature 1"
        )


def _tasks(
    arguments: argparse.Namespace,
    config: RegenerateConfig,
    source: PairSource,
    refused: list[str],
) -> tuple[Iterable[Task], int]:
    """Returns the texts to write, and how many there are."""
    settings = config.regeneration
    if arguments.samples is not None:
        return sample_tasks(source.tokenizer, arguments.samples), arguments.samples
    found = read_examples(
        arguments.data, max_malformed=settings.max_malformed, need_answers=False
    )
    say(f"{arguments.data}: {found.summary()}")
    examples, tokenizer = found.examples[: arguments.limit], source.tokenizer
    if any(example.messages for example in examples):
        check_template(tokenizer)
    for example in examples:
        if not example.messages:
            check_ids(example, source.config.vocab_size)
    tasks = example_tasks(tokenizer, examples, settings, config.sampling.seed, refused)
    return tasks, len(examples)


def _settings(
    arguments: argparse.Namespace,
    config: RegenerateConfig,
    max_length: int,
    date: str | None,
) -> dict[str, Any]:
    """Returns all that the texts depend on: neither batches nor drafts do."""
    data, dtype = arguments.data, config.regeneration.dtype
    settings = {
        "target": fingerprint_folder(resolve(arguments.target)),
        "data": "samples" if data is None else fingerprint_file(data),
        "date": None if data is None else date,
    }
    settings |= dataclasses.asdict(config.sampling)
    settings |= dataclasses.asdict(config.regeneration) | {
        "max_length": max_length,
        "dtype": f"auto on {jax.default_backend()}" if dtype == "auto" else dtype,
    }
    del settings["batch_size"]
    return settings


class _Answerer:
    """Decodes prompts, with one compilation per bucket of prompt lengths."""

    def __init__(
        self,
        pair: LoadedPair,
        config: RegenerateConfig,
        max_length: int,
        batch_size: int,
    ) -> None:
        self._max_length = max_length
        self._new_tokens = config.regeneration.max_new_tokens
        self._runner = Runner(
            pair=pair,
            drafter=pair.drafter,
            config=GenerateConfig(
                tree=config.tree,
                sampling=config.sampling,
                decoding=DecodingConfig(max_new_tokens=self._new_tokens),
            ),
            max_length=max_length,
            prompt_bucket=0,
            batch_size=batch_size,
        )

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[Answer]:
        longest = max(map(len, prompts))
        runner = dataclasses.replace(
            self._runner,
            prompt_bucket=bucket_prompt(longest),
            # More slots would cost time for nothing.
            max_length=min(self._max_length, bucket_prompt(longest) + self._new_tokens),
        )
        return [
            Answer(
                ids=row.generated_ids,
                text=text.continuation(
                    runner.pair.tokenizer, row.prompt_ids, row.generated_ids
                ),
                is_complete=row.stop_reason == StopReason.STOP_TOKEN,
            )
            for row in runner.run(prompts, seeds).rows
        ]


class _Counts:
    """What was written, as the line that a run ends with."""

    def __init__(self) -> None:
        self.texts = self._tokens = self._left_out = 0
        self.refused: list[str] = []

    def add(self, record: dict[str, Any] | None) -> None:
        if record is None:
            self._left_out += 1
            return
        self.texts += 1
        self._tokens += sum(record["loss_mask"])

    def __str__(self) -> str:
        parts = [f"{self.texts} texts", f"{self._tokens} tokens to learn from"]
        if self._left_out:
            parts.append(
                f"{self._left_out} left out: no room for an answer, or refused by the "
                "chat template"
            )
        if self.refused:
            parts.append(
                f"{len(self.refused)} refused from some turn on ({self.refused[0]})"
            )
        return " | ".join(parts)
