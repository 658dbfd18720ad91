"""Answers of one run to questions, turn by turn: a pair in, records out."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from eagle_jax.decoding.requests import bucket_length
from eagle_jax.engine import text
from eagle_jax.engine.batches import decode_all
from eagle_jax.engine.pairs import LoadedPair
from eagle_jax.engine.rows import Row
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.scheduler import Scheduler
from eagle_jax.engine.served import Served
from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.plan import EvaluationConfig, RunPlan
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import COLUMNS, Record
from eagle_jax.evaluation.templates import encode

_TURN_SEEDS = 1 << 24
"""The distance between the seeds of two turns: more than any file has questions."""


@dataclasses.dataclass(kw_only=True)
class _Conversation:
    """A question that is being answered.

    Attributes:
        question: The question that is asked.
        prompt: The ids of the next turn's prompt.
        seed: The next turn's seed, its own among all questions and turns: prompts that
            are cut to one length would share their noise otherwise.
        columns: The lists of its record so far, see `Record`.
        trees: The trees of all rounds so far, where they are looked at.
    """

    question: Question
    prompt: list[int] = dataclasses.field(default_factory=list)
    seed: int = 0
    columns: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {name: [] for name in COLUMNS}
    )
    trees: list[VerifiedTree] = dataclasses.field(default_factory=list)


class QuestionAnswerer:
    """A run that is ready to answer questions, in batches of one prompt bucket.

    Attributes:
        plan: The run's method and settings.
        room: The largest number of tokens of a prompt.
        num_cut: The number of prompts so far that were longer than the room and lost
            their beginning.
    """

    def __init__(
        self, plan: RunPlan, pair: LoadedPair, config: EvaluationConfig, max_length: int
    ) -> None:
        """Takes the pair with the run's own drafter, and compiles nothing."""
        self.plan = plan
        self.room = max_length - plan.config.request.max_new_tokens
        self.num_cut = 0
        self._pair, self._config = pair, config
        self._has_nodes = config.with_nodes and pair.drafter is not None
        self._warm: dict[int, Runner] = {}

    def answer(self, questions: Iterable[Question]) -> Iterator[Record]:
        """Yields a record per question, in the order in which they are finished.

        Each question is begun when a batch has room.
        """
        begun = (self._next(_Conversation(question=question)) for question in questions)
        if self.plan.config.batch_size == 1:
            for conversation in begun:
                yield from self._answer_alone(conversation)
        else:
            yield from self._answer_together(begun)

    def _answer_alone(self, conversation: _Conversation) -> Iterator[Record]:
        """Answers one question, each of its turns as one program."""
        while conversation.prompt:
            bucket = self._bucket(conversation)
            if bucket not in self._warm:
                self._warm[bucket] = self._runner(bucket)
                self._warm[bucket].warm_up(by_round=False)
            runner = self._warm[bucket]
            asked = runner.request(conversation.seed)
            (served,) = decode_all(runner, [conversation.prompt], [asked])
            yield from self._take(conversation, served)

    def _answer_together(self, begun: Iterator[_Conversation]) -> Iterator[Record]:
        """Answers questions in the rows of one running batch."""
        runner = self._runner(self.room)
        scheduler = Scheduler(runner)

        def ask(conversation: _Conversation) -> None:
            asked = runner.request(conversation.seed)
            scheduler.add(conversation, conversation.prompt, asked)

        while True:
            # Enough for every row to have another at once; a question is not read
            # before.
            free = max(runner.batch_size - scheduler.num_waiting, 0)
            for conversation in itertools.islice(begun, free):
                ask(conversation)
            if scheduler.is_idle:
                return
            for served in scheduler.step():
                conversation = served.key
                yield from self._take(conversation, served)
                if conversation.prompt:
                    ask(conversation)

    def _next(self, conversation: _Conversation) -> _Conversation:
        """Sets the next turn's prompt, without its beginning if too long, and seed."""
        answers = conversation.columns["turns"]
        turns = conversation.question.turns[: len(answers) + 1]
        ids = encode(self._pair.tokenizer, self._config.template, turns, answers)
        self.num_cut += len(ids) > self.room
        first = self.plan.config.request.seed + conversation.question.number
        conversation.prompt = ids[-self.room :]
        conversation.seed = (first + len(answers) * _TURN_SEEDS) % 2**32
        return conversation

    def _take(self, conversation: _Conversation, served: Served) -> Iterator[Record]:
        """Adds the answer to a turn; goes on with the next, or yields the record."""
        row, question = served.row, conversation.question
        if self._has_nodes:
            self._look_at_rounds(conversation, row)
        turn = {
            "turns": text.continuation(
                self._pair.tokenizer, row.prompt_ids, row.generated_ids
            ),
            "wall_time": served.prefill_seconds + served.decode_seconds,
            "decoding_steps": len(row.accept_lengths),
            "prompt_tokens": len(row.prompt_ids),
            "token_ids": row.generated_ids,
            "stop_reasons": row.stop_reason.name.lower(),
        }
        columns = conversation.columns
        for name, value in turn.items():
            columns[name].append(value)
        columns["accept_lengths"] += [accepted + 1 for accepted in row.accept_lengths]
        if len(columns["turns"]) < len(question.turns):
            self._next(conversation)
            return
        conversation.prompt = []
        yield Record(
            question_id=question.question_id,
            category=question.category,
            question=question.fingerprint,
            number=question.number,
            **columns,
            nodes=tuple(conversation.trees) if self._has_nodes else None,
            model_id=self.plan.model_id,
        )

    def _look_at_rounds(self, conversation: _Conversation, timed: Row) -> None:
        """Decodes a turn once more, round by round, and keeps its trees."""
        runner = self._runner(self._bucket(conversation))
        runner = dataclasses.replace(runner, batch_size=1)
        tokens: list[int] = []
        asked = runner.request(conversation.seed)
        for (row,), done in runner.rounds([conversation.prompt], [asked]):
            tokens = row.generated_ids
            if done is not None:
                conversation.trees += VerifiedTree.of(done)
        if tokens != timed.generated_ids:
            raise InputError(
                f"{self.plan.model_id}: decoded round by round, question "
                f"{conversation.question.question_id!r} has other tokens, so its "
                "nodes say nothing about the text; give `dtype` float32, where "
                "near ties fall alike, or record no nodes"
            )

    def _bucket(self, conversation: _Conversation) -> int:
        return min(self.room, bucket_length(len(conversation.prompt)))

    def _runner(self, bucket: int) -> Runner:
        config = self.plan.config
        return Runner(
            pair=self._pair,
            drafter=self._pair.drafter,
            config=config,
            # More slots would cost time for nothing.
            max_length=bucket + config.request.max_new_tokens,
            prompt_bucket=bucket,
            batch_size=config.batch_size,
        )
