"""All questions through one run, each answered turn by turn and put on record."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from eagle_jax.cli.command import say
from eagle_jax.cli.progress import progress
from eagle_jax.cli.runs import Run
from eagle_jax.decoding.requests import make_requests
from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import VerifiedTree, nodes_record
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import Record, RecordFile, Turn, make_record
from eagle_jax.evaluation.step_times import StepSeconds, measure_steps
from eagle_jax.evaluation.templates import Template, encode
from eagle_jax.generation import text
from eagle_jax.generation.pairs import LoadedPair
from eagle_jax.generation.programs import Programs
from eagle_jax.generation.runner import BatchResult, Runner, Snapshot

_MEASURED_TOKENS = 65
_TURN_SEEDS = 1 << 24
"""From one turn's seed to the next one's: more than any file has questions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is ready to go.

    Attributes:
        run: Its method and settings.
        pair: With the run's own drafter and parameters.
        settings: The field `run` of its records.
        path: Of its records.
        template: How turns become prompts.
        system: System prompt, or `None`.
        max_length: Prompt plus output.
        with_nodes: Decode every batch once more, to see what became of its nodes.
        programs: What is compiled, of all runs.
    """

    run: Run
    pair: LoadedPair
    settings: dict[str, Any]
    path: Path
    template: Template
    system: str | None
    max_length: int
    with_nodes: bool
    programs: Programs

    @property
    def room(self) -> int:
        """Tokens of a prompt, at most."""
        return self.max_length - self.run.config.decoding.max_new_tokens


@dataclasses.dataclass(kw_only=True)
class _Conversation:
    """A question that is being answered.

    Attributes:
        question: What is asked.
        turns: The answers so far.
        trees: Of all rounds so far, where they are looked at.
        prompt: Ids of the next turn.
    """

    question: Question
    turns: list[Turn]
    trees: list[VerifiedTree]
    prompt: list[int]

    @property
    def is_done(self) -> bool:
        """Whether every turn is answered."""
        return len(self.turns) == len(self.question.turns)

    def seed(self, first: int) -> int:
        """Returns the next turn's seed, its own among all questions and turns.

        Prompts that are cut to one length would share their noise otherwise.

        Args:
            first: That of the first question's first turn.
        """
        turn = len(self.turns)
        return (first + self.question.number + turn * _TURN_SEEDS) % 2**32


def evaluate(job: Job, questions: list[Question]) -> list[Record]:
    """Answers what is not on record yet.

    Args:
        job: The run.
        questions: All that shall be on record in the end.

    Returns:
        All records of the run's file.

    Raises:
        InputError: If the file is refused, see `RecordFile`, or rounds looked at one
            by one give other tokens.
        KeyboardInterrupt: After Ctrl-C; what is on record stays.
    """
    with RecordFile(job.path, job.settings, questions) as file:
        known = {record["question_id"] for record in file.records}
        missing = [q for q in questions if q.question_id not in known]
        total, done = len(questions), len(questions) - len(missing)
        name = job.run.model_id
        if done:
            say(f"{name}: {done} of {total} questions are on record already")
        answerer = _Answerer(job, _step_seconds(file.records))
        if missing:
            with progress(name, total, done) as update:
                for record in answerer.answer(missing):
                    file.append(record)
                    done += 1
                    update(done)
        without = sum(record["nodes"] is None for record in file.records)
        if job.with_nodes and job.pair.drafter is not None and without:
            say(
                f"warning: {job.path.name}: {without} records were written without "
                "--nodes and stay so"
            )
        if answerer.num_cut:
            say(
                f"warning: {job.path.name}: {answerer.num_cut} prompts were longer "
                f"than max_length - max_new_tokens = {job.room} tokens and lost their "
                "beginning"
            )
        return file.records


def _step_seconds(records: Iterable[Record]) -> StepSeconds | None:
    """Returns what the run's steps were measured to cost, if they were."""
    return next((r["step_seconds"] for r in records if r.get("step_seconds")), None)


class _Answerer:
    """Answers questions in batches of one prompt bucket.

    Attributes:
        num_cut: Prompts that lost their beginning.
    """

    def __init__(self, job: Job, step_seconds: StepSeconds | None) -> None:
        """Takes the run, and what its steps cost if that was measured before."""
        self.num_cut = 0
        self._job = job
        self._step_seconds = step_seconds
        self._runners: dict[int, Runner] = {}

    def answer(self, questions: Iterable[Question]) -> Iterator[Record]:
        """Yields a record per question, in the order in which they are finished."""
        size = self._job.run.config.decoding.batch_size
        for bucket, batch in _batches(self._open(questions), size, self._job.room):
            self._decode(self._runner(bucket), batch)
            for conversation in batch:
                if conversation.is_done:
                    yield self._record(conversation)
                else:
                    conversation.prompt = self._encode(conversation)

    def _open(self, questions: Iterable[Question]) -> Iterator[_Conversation]:
        for question in questions:
            conversation = _Conversation(
                question=question, turns=[], trees=[], prompt=[]
            )
            conversation.prompt = self._encode(conversation)
            yield conversation

    def _encode(self, conversation: _Conversation) -> list[int]:
        """Returns the prompt of the next turn, without its beginning if too long."""
        job, answers = self._job, [turn.text for turn in conversation.turns]
        turns = conversation.question.turns[: len(answers) + 1]
        ids = encode(
            job.pair.tokenizer, job.template, turns, answers, system=job.system
        )
        self.num_cut += len(ids) > job.room
        return ids[-job.room :]

    def _runner(self, bucket: int) -> Runner:
        """Returns what decodes prompts of one padded length, compiled."""
        if bucket not in self._runners:
            job, config = self._job, self._job.run.config
            needed = bucket + config.decoding.max_new_tokens
            runner = Runner(
                pair=job.pair,
                drafter=job.pair.drafter,
                config=config,
                # More slots would cost time for nothing.
                max_length=min(job.max_length, needed),
                prompt_bucket=bucket,
                batch_size=config.decoding.batch_size,
                programs=job.programs,
            )
            runner.warm_up(by_round=False)
            self._runners[bucket] = runner
        return self._runners[bucket]

    def _decode(self, runner: Runner, batch: list[_Conversation]) -> None:
        """Answers one turn of each conversation."""
        prompts = [conversation.prompt for conversation in batch]
        first_seed = self._job.run.config.sampling.seed
        seeds = [conversation.seed(first_seed) for conversation in batch]
        result = runner.run(prompts, seeds)
        if self._step_seconds is None:
            self._step_seconds = self._measure(runner, prompts, seeds)
        if self._job.with_nodes and runner.drafter is not None:
            self._look_at_rounds(runner, batch, seeds, result)
        share = len(batch)
        for conversation, row in zip(batch, result.rows, strict=True):
            answer = text.continuation(
                self._job.pair.tokenizer, row.prompt_ids, row.generated_ids
            )
            turn = Turn(
                text=answer,
                token_ids=row.generated_ids,
                prompt_tokens=len(row.prompt_ids),
                wall_time=(result.prefill_seconds + result.decode_seconds) / share,
                decode_time=result.decode_seconds / share,
                accept_lengths=[accepted + 1 for accepted in row.accept_lengths],
                stop_reason=row.stop_reason.name.lower(),
            )
            conversation.turns.append(turn)

    def _look_at_rounds(
        self,
        runner: Runner,
        batch: list[_Conversation],
        seeds: list[int],
        timed: BatchResult,
    ) -> None:
        """Decodes a batch once more, round by round, and keeps its trees."""

        def observe(snapshot: Snapshot) -> None:
            if snapshot.round is None:
                return
            done = snapshot.round
            # What drafts were drawn from is large, and not looked at.
            tree = dataclasses.replace(done.tree, draft_logits=None)
            tree, acceptance, count = jax.device_get(
                (tree, done.acceptance, done.count)
            )
            for row, conversation in enumerate(batch):
                if count[row]:
                    seen = VerifiedTree.of(tree, acceptance, row)
                    conversation.trees.append(seen)

        prompts = [conversation.prompt for conversation in batch]
        result = runner.run(prompts, seeds, observe)
        if result.was_interrupted:
            raise KeyboardInterrupt
        rows = zip(batch, result.rows, timed.rows, strict=True)
        for conversation, row, timed_row in rows:
            if row.generated_ids != timed_row.generated_ids:
                raise InputError(
                    f"{self._job.run.model_id}: decoded round by round, question "
                    f"{conversation.question.question_id!r} has other tokens, so its "
                    "nodes say nothing about the text; give --dtype float32, where "
                    "near ties fall alike, or leave out --nodes"
                )

    def _measure(
        self, runner: Runner, prompts: list[list[int]], seeds: list[int]
    ) -> StepSeconds:
        """Times the run's steps on a batch, filled up with its first prompt."""
        config, missing = runner.config, runner.batch_size - len(prompts)
        sampling = config.sampling
        requests = make_requests(
            prompts + [prompts[0]] * missing,
            max_new_tokens=min(config.decoding.max_new_tokens, _MEASURED_TOKENS),
            max_length=runner.max_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seeds=seeds + [seeds[0]] * missing,
            prompt_bucket=runner.prompt_bucket,
        )
        return measure_steps(
            runner.decoder,
            runner.pair.params,
            requests,
            max_length=runner.max_length,
        )

    def _record(self, conversation: _Conversation) -> Record:
        has_nodes = self._job.with_nodes and self._job.pair.drafter is not None
        return make_record(
            conversation.question,
            conversation.turns,
            model_id=self._job.run.model_id,
            run=self._job.settings,
            step_seconds=self._step_seconds,
            nodes=nodes_record(conversation.trees) if has_nodes else None,
        )


def _bucket(length: int, room: int) -> int:
    """Returns 64, 256, 1024, ... up to `room`: few, each compiles in every run."""
    sizes = (64 * 4**power for power in range(16))
    return min(room, next(size for size in sizes if size >= length))


def _batches(
    conversations: Iterator[_Conversation], size: int, room: int
) -> Iterator[tuple[int, list[_Conversation]]]:
    """Yields batches of one prompt bucket until every conversation is done.

    A batch is yielded as soon as it is full; only when no conversation is left to be
    begun, the largest unfilled one. What is not done after its batch waits again.

    Args:
        conversations: In order; each is begun when a batch has room for it.
        size: Of a full batch.
        room: Tokens of a prompt, at most.

    Yields:
        The bucket and 1 to `size` conversations.
    """
    waiting: dict[int, deque[_Conversation]] = {}

    def wait(conversation: _Conversation) -> None:
        bucket = _bucket(len(conversation.prompt), room)
        waiting.setdefault(bucket, deque()).append(conversation)

    while True:
        bucket = max(waiting, key=lambda key: len(waiting[key]), default=None)
        if bucket is None or len(waiting[bucket]) < size:
            begun = next(conversations, None)
            if begun is not None:
                wait(begun)
                continue
        if bucket is None or not waiting[bucket]:
            return
        queue = waiting[bucket]
        batch = [queue.popleft() for _ in range(min(size, len(queue)))]
        yield bucket, batch
        for conversation in batch:
            if not conversation.is_done:
                wait(conversation)
