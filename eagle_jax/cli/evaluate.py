"""All questions through one run, put on record."""

from pathlib import Path

from eagle_jax.cli.command import say
from eagle_jax.cli.progress import progress
from eagle_jax.evaluation.answers import Answerer
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.record_files import RecordFile
from eagle_jax.evaluation.records import Record


def evaluate(answerer: Answerer, questions: list[Question], path: Path) -> list[Record]:
    """Answers what is not on record yet.

    Args:
        answerer: The run.
        questions: All that shall be on record in the end.
        path: Of the run's file.

    Returns:
        All records of the run's file.

    Raises:
        InputError: If the file is refused, see `RecordFile`, or as of `Answerer`.
        KeyboardInterrupt: After Ctrl-C; what is on record stays.
    """
    with RecordFile(path, answerer.settings, questions) as file:
        known = {record.question_id for record in file.records}
        missing = [q for q in questions if q.question_id not in known]
        total, done = len(questions), len(questions) - len(missing)
        name = answerer.plan.model_id
        if done:
            say(f"{name}: {done} of {total} questions are on record already")
        measured = (r.step_seconds for r in file.records if r.step_seconds)
        answerer.step_seconds = next(measured, None)
        if missing:
            with progress(name, total, done) as update:
                for record in answerer.answer(missing):
                    file.add(record)
                    done += 1
                    update(done)
        without = sum(record.nodes is None for record in file.records)
        if answerer.has_nodes and without:
            say(
                f"warning: {path.name}: {without} records were written without "
                "--nodes and stay so"
            )
        if answerer.num_cut:
            say(
                f"warning: {path.name}: {answerer.num_cut} prompts were longer than "
                f"max_length - max_new_tokens = {answerer.room} tokens and lost their "
                "beginning"
            )
        return file.records
