"""From data files to what a run reads: encoded, split, packed."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import Placement
from eagle_jax.progress import Report
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.conversations import Example, read_examples
from eagle_jax.training.encode import encode_examples
from eagle_jax.training.evaluate import prompts_of
from eagle_jax.training.features import FeatureDtype, write_features
from eagle_jax.training.loop import TrainingData
from eagle_jax.training.loss import target_features
from eagle_jax.training.packing import PackedRows, hold_out, pack, rows_at
from eagle_jax.training.step import StepConfig

_LINES = 20  # Of malformed records, reported one by one.


def read_data(
    paths: Sequence[Path],
    held_out_paths: Sequence[Path],
    tokenizer: Any,
    target: TransformerConfig,
    config: TrainConfig,
    *,
    stop_tokens: tuple[int, ...],
    report: Report,
) -> TrainingData:
    """Reads data files into rows.

    Args:
        paths: See `read_examples`.
        held_out_paths: To evaluate on; without any a share of the data is held out.
        tokenizer: Of the target.
        target: Its sizes.
        config: Of the run.
        stop_tokens: Ids that end a text.
        report: Called with lines for a log: what was read, left out and cut.

    Raises:
        InputError: If a file holds nothing usable or too much that is malformed.
    """
    run = config.run
    train = _read(paths, config, report)
    held_out = _read(held_out_paths, config, report)
    if not held_out:
        train, held_out = hold_out(train, share=config.data.held_out, seed=run.seed)
    packed: list[PackedRows] = []
    samples = []
    for name, part in (("training", train), ("held out", held_out)):
        encoded = encode_examples(
            part,
            tokenizer,
            max_length=config.data.row_length,
            too_long=config.data.too_long,
            vocab_size=target.vocab_size,
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
            plain_tokens=run.eval_prompt_tokens,
            max_tokens=target.max_positions - 1,
        ),
        stop_tokens=stop_tokens,
    )


def _read(paths: Sequence[Path], config: TrainConfig, report: Report) -> list[Example]:
    examples: list[Example] = []
    for path in paths:
        found = read_examples(path, max_malformed=config.data.max_malformed)
        for line in found.malformed[:_LINES]:
            report(f"left out: {line}")
        report(f"{path}: {found.summary()}")
        examples += found.examples
    return examples


def cache_features(
    folder: Path,
    rows: PackedRows,
    target_params: Any,
    placement: Placement,
    *,
    step_config: StepConfig,
    target: str,
    batch_size: int,
    progress: Callable[[int], None],
) -> Any:
    """Computes the target's features of all rows, or what a folder still lacks.

    Args:
        folder: Of the features.
        rows: To train on.
        target_params: Frozen.
        placement: Where they lie.
        step_config: Of the run; features are kept in its dtype, so that a run gets
            the same numbers as without the cache.
        target: Fingerprint of the target.
        batch_size: Rows per call.
        progress: Called with the number of rows done.

    Returns:
        A `FeatureStore`.
    """
    compute = jax.jit(functools.partial(target_features, step_config.target))
    dtype = cast(FeatureDtype, step_config.dtype)
    return write_features(
        folder,
        rows,
        lambda batch: compute(target_params, placement.put_rows(batch)),
        target=f"{target}-{dtype}",
        batch_size=batch_size,
        dtype=dtype,
        progress=progress,
    )
