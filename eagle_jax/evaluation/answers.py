"""Answers of one run to questions, turn by turn: a pair in, records out."""

import collections
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from eagle_jax.decoding.requests import bucket_length
from eagle_jax.engine import Engine, Pair, Text
from eagle_jax.engine.converse import converse
from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.plan import EvaluationConfig, RunPlan
from eagle_jax.evaluation.questions import Question, encode
from eagle_jax.evaluation.records import COLUMNS, Record

_TURN_SEEDS = 1 << 24
"""The distance between the seeds of two turns: more than any file has questions."""


class QuestionAnswerer:
    """A run that is ready to answer questions, in batches of one prompt bucket.

    Attributes:
        plan: The run's method and settings.
        room: The largest number of tokens of a prompt.
        num_cut: The number of prompts so far that were longer than the room and lost
            their beginning.
    """

    def __init__(
        self, plan: RunPlan, pair: Pair, config: EvaluationConfig, max_length: int
    ) -> None:
        """Takes the pair with the run's own drafter, and compiles nothing."""
        self.plan = plan
        self.room = max_length - plan.config.request.max_new_tokens
        self.num_cut = 0
        self._pair, self._config = pair, config
        self._has_nodes = config.with_nodes and pair.drafter is not None

    def answer(self, questions: Iterable[Question]) -> Iterator[Record]:
        """Yields a record per question, in the order in which they are finished.

        Each question is begun when a batch has room.
        """
        tasks, size = map(self._answer, questions), self.plan.config.batch_size
        if size > 1:
            engine = self._engine(self.room, size)
            for _, record in converse(engine, tasks, ahead=size):
                yield record
            return
        for task in tasks:
            yield from self._answer_alone(task)

    def _answer_alone(self, task: Generator[Text, Text, Record]) -> Iterator[Record]:
        """Answers one question, each of its turns as one program."""
        try:
            text = next(task)
            while True:
                self._write(text)
                text = task.send(text)
        except StopIteration as end:
            yield end.value

    def _answer(self, question: Question) -> Generator[Text, Text, Record]:
        """Asks the turns of a question one by one."""
        columns: dict[str, Any] = {name: [] for name in COLUMNS}
        trees: list[VerifiedTree] = []
        answers = columns["turns"]
        for turn in range(len(question.turns)):
            asked = question.turns[: turn + 1]
            ids = encode(self._pair.tokenizer, self._config.template, asked, answers)
            # Prompts that are too long lose their beginning.
            self.num_cut += len(ids) > self.room
            # Its own among all questions and turns: prompts that are cut to one length
            # would share their noise otherwise.
            seed = self.plan.config.request.seed + question.number
            request = self._pair.request(seed=(seed + turn * _TURN_SEEDS) % 2**32)
            text = yield self._pair.text(ids[-self.room :], request)
            if self._has_nodes:
                trees += self._look_at_rounds(text, question)
            answer = {
                "turns": text.text,
                "wall_time": text.prefill_seconds + text.decode_seconds,
                "decoding_steps": len(text.accept_lengths),
                "prompt_tokens": len(text.prompt_ids),
                "token_ids": text.token_ids,
                "stop_reasons": text.stop_reason.name.lower(),
            }
            for name, value in answer.items():
                columns[name].append(value)
            columns["accept_lengths"] += [1 + n for n in text.accept_lengths]
        return Record(
            question_id=question.question_id,
            category=question.category,
            question=question.fingerprint,
            number=question.number,
            **columns,
            nodes=tuple(trees) if self._has_nodes else None,
            model_id=self.plan.model_id,
        )

    def _look_at_rounds(self, timed: Text, question: Question) -> list[VerifiedTree]:
        """Decodes a turn once more, round by round, and returns its trees."""
        text = self._pair.text(timed.prompt_ids, timed.request)
        text.keeps_rounds = True
        self._write(text)
        if text.token_ids != timed.token_ids:
            raise InputError(
                f"{self.plan.model_id}: decoded round by round, question "
                f"{question.question_id!r} has other tokens, so its nodes say nothing "
                "about the text; give `dtype` float32, where near ties fall alike, or "
                "record no nodes"
            )
        return [VerifiedTree.of(done) for done, _ in text.rounds]

    def _write(self, text: Text) -> None:
        """Writes one text alone, with a cache for prompts like its own."""
        engine = self._engine(min(self.room, bucket_length(len(text.prompt_ids))), 1)
        engine.add(text)
        collections.deque(engine.run(), maxlen=0)

    def _engine(self, longest: int, batch_size: int) -> Engine:
        # More slots would cost time for nothing.
        max_length = longest + self.plan.config.request.max_new_tokens
        return self._pair.engine(batch_size=batch_size, max_length=max_length)
