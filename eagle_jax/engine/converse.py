"""Tasks that take several texts each, through the rows of one engine."""

from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from eagle_jax.engine.engine import Engine
from eagle_jax.engine.text import Text

Result = TypeVar("Result")


def converse(
    engine: Engine, tasks: Iterable[Generator[Text, Text, Result]], *, ahead: int
) -> Iterator[tuple[int, Result]]:
    """Lets tasks go on side by side, each of which waits for one text at a time.

    Args:
        engine: What writes.
        tasks: Generators that yield a text, are sent it when it has ended, and return
            their result. One is begun, and its text read, when the queue has room.
        ahead: The texts that wait, so that no row is without work; it changes no text.

    Yields:
        The number of a task and its result, as it ends.
    """
    waiting = enumerate(tasks)
    under_way: dict[Text, tuple[int, Generator[Text, Text, Result]]] = {}
    ended: list[tuple[int, Result]] = []

    def go_on(
        number: int, task: Generator[Text, Text, Result], text: Text | None
    ) -> None:
        try:
            asked = next(task) if text is None else task.send(text)
        except StopIteration as end:
            ended.append((number, end.value))
        else:
            under_way[engine.add(asked)] = number, task

    while True:
        while engine.num_waiting < ahead and (begun := next(waiting, None)):
            go_on(*begun, None)
        yield from ended
        ended.clear()
        if not under_way:
            return
        for text in engine.step(rounds=None, until_one_ends=True):
            go_on(*under_way.pop(text), text)
