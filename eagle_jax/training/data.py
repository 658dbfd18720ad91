"""From data files to the rows, features and prompts of a run."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.engine import Pair
from eagle_jax.errors import InputError, first_line
from eagle_jax.files import write_whole
from eagle_jax.heads.rows import PackedRows
from eagle_jax.parallel import wait_for_all
from eagle_jax.reporting import Progress, Report
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.conversations import Example, read_examples
from eagle_jax.training.encode import EncodedExample, encode_examples
from eagle_jax.training.packing import hold_out, pack, rows_at

_PLAIN_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of a run.

    Attributes:
        rows: The rows to train on, `[R, T]` NumPy arrays.
        held_out: The rows to evaluate on, `[R', T]` NumPy arrays.
        prompts: The held-out prompts to decode, as lists of ids.
        stop_tokens: The ids that end a text.
        max_length: The tokens of prompt and output of a decoded text at most; `None`
            for what the prompts and the new tokens need.
    """

    rows: PackedRows
    held_out: PackedRows
    prompts: Sequence[Sequence[int]]
    stop_tokens: tuple[int, ...] = ()
    max_length: int | None = None


def read_data(
    paths: Sequence[Path],
    held_out_paths: Sequence[Path],
    source: Pair,
    config: TrainConfig,
    *,
    report: Report,
    progress: Progress,
) -> TrainingData:
    """Reads data files into rows.

    Args:
        paths: The files to train on, see `read_examples`.
        held_out_paths: The files to evaluate on; without any a share of the data is
            held out.
        source: The target.
        config: The run's settings.
        report: Called with lines for a log: what was read, left out and cut.
        progress: Called to show how far work is.
    """
    run = config.run
    train = _read(paths, report)
    held_out = _read(held_out_paths, report)
    if not held_out:
        train, held_out = hold_out(train, share=config.data.held_out, seed=run.seed)
    packed: list[PackedRows] = []
    samples = []
    for name, part in (("training", train), ("held out", held_out)):
        with progress(f"encoding {name} texts", len(part)) as update:
            encoded = encode_examples(
                part,
                source.tokenizer,
                max_length=config.data.row_length,
                vocab_size=source.sizes.vocab_size,
                progress=update,
            )
        samples.append(encoded.samples)
        packed.append(pack(encoded.samples, config.data.row_length))
        report(
            f"{name}: {encoded.summary()} | {len(packed[-1])} rows of "
            f"{config.data.row_length}, {packed[-1].padding:.1%} padding"
        )
    # The longest samples fill the first rows.
    eval_rows = min(run.eval_rows, len(packed[1]))
    order = np.random.default_rng(run.seed).permutation(len(samples[1]))
    return TrainingData(
        rows=packed[0],
        held_out=packed[1][rows_at(len(packed[1]), 0, eval_rows, run.seed)],
        prompts=prompts_of(
            [samples[1][number] for number in order],
            count=run.eval_prompts,
            max_tokens=source.sizes.max_positions - 1,
        ),
        stop_tokens=source.stop_tokens,
        max_length=source.sizes.max_positions,
    )


def _read(paths: Sequence[Path], report: Report) -> list[Example]:
    examples: list[Example] = []
    for path in paths:
        found = read_examples(path)
        report(f"{path}: {found.summary()}")
        examples += found.examples
    return examples


def prompts_of(
    examples: Sequence[EncodedExample], *, count: int, max_tokens: int
) -> list[list[int]]:
    """Returns prompts to decode: the tokens before the first one to predict.

    Of a text that is to be predicted from its start they are its first sixteen, at most
    half of all.

    Args:
        examples: The held-out examples.
        count: The largest number of prompts.
        max_tokens: The tokens of the longest prompt; longer ones are passed over.
    """
    prompts = []
    for example in examples:
        length = len(example.tokens)
        first = int(np.argmax(example.loss_mask)) if example.loss_mask.any() else length
        size = max(first, min(_PLAIN_TOKENS, length // 2), 1)
        if size < length and size <= max_tokens:
            prompts.append(example.tokens[:size].tolist())
    return prompts[:count]


def cached_features(
    path: Path,
    rows: PackedRows,
    compute: Callable[[PackedRows], Any],
    *,
    batch_size: int,
    dtype: str,
    progress: Callable[[int], None],
) -> np.ndarray:
    """Returns the target's features of rows, which are computed once and kept on disk.

    Of several processes, which share the file, all compute and the first one writes.

    Args:
        path: The file of NumPy's, of integers as wide as `dtype`; written if missing.
        rows: The rows, `[R, T]` fields.
        compute: A function from rows to features, `[batch_size, T, F]` of `dtype`; it
            is always called with `batch_size` rows, so that it is compiled once.
        batch_size: The number of rows of a call of `compute`, `B`.
        dtype: The type of the features.
        progress: Called with the number of rows done.

    Returns:
        `[R, T, F]`, read from disk as it is indexed.

    Raises:
        InputError: If the file cannot be written or read.
    """
    is_missing = not path.exists()
    wait_for_all("all have looked for the features")

    def fill(place: Path | None) -> None:
        written = None
        for start in range(0, len(rows), batch_size):
            numbers = np.arange(start, min(start + batch_size, len(rows)))
            found = compute(rows[np.resize(numbers, batch_size)])[: len(numbers)]
            found = np.asarray(found).view(f"u{jnp.dtype(dtype).itemsize}")
            if place is not None and written is None:
                shape = (len(rows), *found.shape[1:])
                written = np.lib.format.open_memmap(place, "w+", found.dtype, shape)
            if written is not None:
                written[numbers] = found
            progress(int(numbers[-1]) + 1)

    if is_missing and jax.process_index() == 0:
        write_whole(path, fill)
    elif is_missing:
        fill(None)
    wait_for_all("all features are written")
    try:
        return np.load(path, mmap_mode="r").view(jnp.dtype(dtype))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read features from {path} ({first_line(error)}); remove it and go "
            "on with the run, which computes them again"
        ) from error
