"""Prompts in batches: one after the other, or through the rows of a queue."""

from collections.abc import Iterator, Sequence

from eagle_jax.generation.runner import Runner
from eagle_jax.generation.scheduler import Scheduler, Served, prefill_tokens

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
    runner: Runner, prompts: Sequence[list[int]], seeds: Sequence[int]
) -> Iterator[Served]:
    """Decodes prompts, and yields the texts in the prompts' order.

    They are decoded batch by batch, each as one program, unless `is_queue`.

    Args:
        runner: The pair with its settings and the shape of its batches.
        prompts: The prompts' token ids.
        seeds: The seeds, one per prompt.
    """
    if is_queue(runner, prompts):
        scheduler, done, shown = Scheduler(runner), dict[int, Served](), 0
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            scheduler.add(number, prompt, seed)
        while not scheduler.is_idle:
            done |= {served.key: served for served in scheduler.step()}
            while shown in done:
                yield done.pop(shown)
                shown += 1
        return
    size = runner.batch_size
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        rows, reading, decoding = runner.run([*batch], [*seeds[start : start + size]])
        for number, row in enumerate(rows):
            yield Served(
                key=start + number,
                row=row,
                prefill_seconds=reading / len(batch),
                decode_seconds=decoding / len(batch),
            )
