"""Answers of one run to questions, turn by turn: a pair in, records out."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from eagle_jax.decoding.requests import bucket_length
from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.plan import RunPlan
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import Record, Turn
from eagle_jax.evaluation.templates import Template, encode
from eagle_jax.generation import text
from eagle_jax.generation.batches import decode_all
from eagle_jax.generation.pairs import LoadedPair
from eagle_jax.generation.rows import Row
from eagle_jax.generation.runner import Runner
from eagle_jax.generation.scheduler import Scheduler, Served

_TURN_SEEDS = 1 << 24
"""The distance between the seeds of two turns: more than any file has questions."""


@dataclasses.dataclass(kw_only=True)
class _Conversation:
    """A question that is being answered.

    Attributes:
        question: The question that is asked.
        turns: The answers so far.
        trees: The trees of all rounds so far, where they are looked at.
        prompt: The ids of the next turn's prompt.
    """

    question: Question
    turns: list[Turn] = dataclasses.field(default_factory=list)
    trees: list[VerifiedTree] = dataclasses.field(default_factory=list)
    prompt: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether every turn is answered."""
        return len(self.turns) == len(self.question.turns)

    def seed(self, first: int) -> int:
        """Returns the next turn's seed, its own among all questions and turns.

        Prompts that are cut to one length would share their noise otherwise.

        Args:
            first: The seed of the first question's first turn.
        """
        turn = len(self.turns)
        return (first + self.question.number + turn * _TURN_SEEDS) % 2**32


@dataclasses.dataclass(kw_only=True)
class Answerer:
    """A run that is ready to answer questions, in batches of one prompt bucket.

    Attributes:
        plan: The run's method and settings.
        pair: The pair, with the run's own drafter and parameters.
        settings: All settings of its run, see `plan.run_settings`.
        max_length: The largest number of tokens of prompt and output.
        template: The form in which turns become prompts.
        system: The system prompt, or `None`.
        with_nodes: Whether to decode every batch once more to record its nodes.
        num_cut: The number of prompts so far that were longer than the room and lost
            their beginning.
    """

    plan: RunPlan
    pair: LoadedPair
    settings: dict[str, Any]
    max_length: int
    template: Template = "none"
    system: str | None = None
    with_nodes: bool = False
    num_cut: int = dataclasses.field(default=0, init=False)
    _runners: dict[int, Runner] = dataclasses.field(default_factory=dict, init=False)

    @property
    def room(self) -> int:
        """The largest number of tokens of a prompt."""
        return self.max_length - self.plan.config.decoding.max_new_tokens

    @property
    def has_nodes(self) -> bool:
        """Whether its records hold drafted nodes."""
        return self.with_nodes and self.pair.drafter is not None

    def answer(self, questions: Iterable[Question]) -> Iterator[Record]:
        """Yields a record per question, in the order in which they are finished.

        Args:
            questions: The questions, each of which is begun when a batch has room.

        Raises:
            InputError: If rounds looked at one by one give other tokens, or a prompt
                has none.
            KeyboardInterrupt: After Ctrl-C.
        """
        conversations = (_Conversation(question=question) for question in questions)
        if self.plan.config.decoding.batch_size == 1:
            yield from self._answer_alone(conversations)
        else:
            yield from self._answer_together(conversations)

    def _answer_alone(self, conversations: Iterator[_Conversation]) -> Iterator[Record]:
        """Answers one question after the other, each turn as one program."""
        for conversation in conversations:
            while not conversation.is_done:
                prompt, seed = self._next(conversation)
                runner = self._runner(min(self.room, bucket_length(len(prompt))))
                for served in decode_all(runner, [prompt], [seed]):
                    self._take(conversation, served)
            yield self._record(conversation)

    def _answer_together(
        self, conversations: Iterator[_Conversation]
    ) -> Iterator[Record]:
        """Answers questions in the rows of one running batch."""
        runner = self._new_runner(self.room)
        scheduler = Scheduler(runner)
        while True:
            # Enough for every row to have another at once; a question is not read
            # before.
            while scheduler.num_waiting < runner.batch_size:
                begun = next(conversations, None)
                if begun is None:
                    break
                scheduler.add(begun, *self._next(begun))
            if scheduler.is_idle:
                return
            for served in scheduler.step():
                conversation = served.key
                self._take(conversation, served)
                if conversation.is_done:
                    yield self._record(conversation)
                else:
                    scheduler.add(conversation, *self._next(conversation))

    def _next(self, conversation: _Conversation) -> tuple[list[int], int]:
        """Returns the prompt and the seed of the next turn."""
        first_seed = self.plan.config.sampling.seed
        if not conversation.prompt:
            conversation.prompt = self._encode(conversation)
        return conversation.prompt, conversation.seed(first_seed)

    def _encode(self, conversation: _Conversation) -> list[int]:
        """Returns the prompt of the next turn, without its beginning if too long."""
        answers = [turn.text for turn in conversation.turns]
        turns = conversation.question.turns[: len(answers) + 1]
        ids = encode(
            self.pair.tokenizer, self.template, turns, answers, system=self.system
        )
        self.num_cut += len(ids) > self.room
        return ids[-self.room :]

    def _runner(self, bucket: int) -> Runner:
        """Returns the compiled runner for prompts of one padded length."""
        if bucket not in self._runners:
            runner = self._new_runner(bucket)
            runner.warm_up(by_round=False)
            self._runners[bucket] = runner
        return self._runners[bucket]

    def _new_runner(self, bucket: int) -> Runner:
        config = self.plan.config
        needed = bucket + config.decoding.max_new_tokens
        return Runner(
            pair=self.pair,
            drafter=self.pair.drafter,
            config=config,
            # More slots would cost time for nothing.
            max_length=min(self.max_length, needed),
            prompt_bucket=bucket,
            batch_size=config.decoding.batch_size,
        )

    def _take(self, conversation: _Conversation, served: Served) -> None:
        """Adds the answer to a turn, and its trees."""
        row = served.row
        if self.has_nodes:
            self._look_at_rounds(conversation, row)
        answer = text.continuation(
            self.pair.tokenizer, row.prompt_ids, row.generated_ids
        )
        turn = Turn(
            text=answer,
            token_ids=row.generated_ids,
            prompt_tokens=len(row.prompt_ids),
            wall_time=served.prefill_seconds + served.decode_seconds,
            decode_time=served.decode_seconds,
            accept_lengths=[accepted + 1 for accepted in row.accept_lengths],
            stop_reason=row.stop_reason.name.lower(),
        )
        conversation.turns.append(turn)
        conversation.prompt = []

    def _look_at_rounds(self, conversation: _Conversation, timed: Row) -> None:
        """Decodes a turn once more, round by round, and keeps its trees."""
        prompt, seed = self._next(conversation)
        bucket = min(self.room, bucket_length(len(prompt)))
        runner = dataclasses.replace(self._new_runner(bucket), batch_size=1)
        tokens: list[int] = []
        for snapshot in runner.rounds([prompt], [seed]):
            tokens = snapshot.rows[0].generated_ids
            if snapshot.round is not None:
                seen = VerifiedTree.of(snapshot.round)
                conversation.trees += [seen[0]] if 0 in seen else []
        if tokens != timed.generated_ids:
            raise InputError(
                f"{self.plan.model_id}: decoded round by round, question "
                f"{conversation.question.question_id!r} has other tokens, so its "
                "nodes say nothing about the text; give `dtype` float32, where "
                "near ties fall alike, or record no nodes"
            )

    def _record(self, conversation: _Conversation) -> Record:
        question = conversation.question
        return Record(
            question_id=question.question_id,
            category=question.category,
            question=question.fingerprint,
            number=question.number,
            turns=tuple(conversation.turns),
            nodes=tuple(conversation.trees) if self.has_nodes else None,
            model_id=self.plan.model_id,
        )
