"""Prompts in batches: one after the other, or through the rows of a queue."""

from collections.abc import Iterator, Sequence

from eagle_jax.engine.prefixes import prefill_tokens
from eagle_jax.engine.request import Request
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.scheduler import Scheduler
from eagle_jax.engine.served import Served

_MOST_PADDING = 1 << 14


def is_queue(runner: Runner, prompts: Sequence[list[int]]) -> bool:
    """Returns whether prompts enter the rows of a running batch one by one.

    They do if there are more than rows, or if one batch would read far more padding
    than prompts. With a single row nothing would be gained.
    """
    rows = runner.batch_size
    if rows == 1 or len(prompts) > rows:
        return rows > 1
    needed = [prefill_tokens(len(prompt)) for prompt in prompts]
    # A queue compiles more programs, which must pay.
    return rows * max(needed) > max(4 * sum(needed), sum(needed) + _MOST_PADDING)


def decode_all(
    runner: Runner, prompts: Sequence[list[int]], settings: Sequence[Request]
) -> Iterator[Served]:
    """Decodes prompts, and yields the texts in the prompts' order.

    They are decoded batch by batch, each as one program, unless `is_queue` or a stop
    string may end one early.

    Args:
        runner: The pair with its settings and the shape of its batches.
        prompts: The prompts' token ids.
        settings: The settings of each.
    """
    if is_queue(runner, prompts) or any(one.stop for one in settings):
        scheduler, done, shown = Scheduler(runner), dict[int, Served](), 0
        for number, (prompt, one) in enumerate(zip(prompts, settings, strict=True)):
            scheduler.add(number, prompt, one)
        while not scheduler.is_idle:
            done |= {served.key: served for served in scheduler.step()}
            while shown in done:
                yield done.pop(shown)
                shown += 1
        return
    size, samples = runner.batch_size, settings[0].n
    if size % samples or any(one.n != samples for one in settings):
        samples = 1
    for start in range(0, len(prompts), size):
        batch, asked = prompts[start : start + size], settings[start : start + size]
        rows, reading, decoding = runner.run([*batch], asked, num_samples=samples)
        for number, row in enumerate(rows):
            yield Served(
                key=start + number,
                row=row,
                settings=asked[number],
                prefill_seconds=reading / len(batch),
                decode_seconds=decoding / len(batch),
            )
