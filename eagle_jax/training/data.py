"""From data files to what a run reads: encoded, split, packed."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.conversations import read_examples
from eagle_jax.training.encode import encode_examples
from eagle_jax.training.evaluate import prompts_of
from eagle_jax.training.features import FeatureDtype, write_features
from eagle_jax.training.loop import TrainingData
from eagle_jax.training.loss import target_features
from eagle_jax.training.packing import PackedRows, hold_out, pack
from eagle_jax.training.step import StepConfig


def read_data(
    paths: Sequence[Path],
    tokenizer: Any,
    target: TransformerConfig,
    config: TrainConfig,
    report: Callable[[str], None],
) -> TrainingData:
    """Reads data files into rows.

    Args:
        paths: See `read_examples`.
        tokenizer: Of the target.
        target: Its sizes.
        config: Of the run.
        report: Called with lines for a log: what was read, left out and cut.

    Raises:
        InputError: If a file holds nothing usable or too much that is malformed.
    """
    examples = []
    for path in paths:
        found = read_examples(path, max_malformed=config.data.max_malformed)
        report(f"{path}: {found.summary()}")
        examples += found.examples
    train, held_out = hold_out(
        examples, share=config.data.held_out, seed=config.run.seed
    )
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
    run = config.run
    room = target.max_positions - run.eval_new_tokens
    return TrainingData(
        rows=packed[0],
        held_out=packed[1][: run.eval_rows],
        prompts=prompts_of(
            [sample for sample in samples[1] if len(sample.tokens) <= room]
            or samples[1],
            count=run.eval_prompts,
            plain_tokens=run.eval_prompt_tokens,
        ),
    )


def cache_features(
    folder: Path,
    rows: PackedRows,
    target_params: TransformerParams,
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
        step_config: Of the run; features are kept in its dtype, so that a run gets
            the same numbers as without the cache.
        target: Fingerprint of the target.
        batch_size: Rows per call.
        progress: Called with the number of rows done.

    Returns:
        A `FeatureStore`.
    """
    compute = jax.jit(functools.partial(target_features, step_config.target))
    dtype: FeatureDtype = step_config.dtype  # type: ignore[assignment]
    return write_features(
        folder,
        rows,
        lambda batch: compute(target_params, batch),
        target=f"{target}-{dtype}",
        batch_size=batch_size,
        dtype=dtype,
        progress=progress,
    )
