"""Train the embedded pair's target further, together with its head.

    python -m examples.embedded_pair.together --run RUN --head HEAD --texts FILES \
        --output RUN2

`--run` is a finished run of `pretrain.py`, `--head` a head that was trained for its
model, and `--texts` are continuations by that model (`eagle-jax regenerate`).
`--num-layers` makes the model deeper first. The new run's folder gets `model/`, a
Hugging Face folder, and `head/`, in the published layout. The same command with
`--resume` goes on where it was stopped.
"""

import argparse
import dataclasses
import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax import checkpoints
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.settings import add_settings
from eagle_jax.engine.wording import load_tokenizer
from eagle_jax.errors import InputError
from eagle_jax.heads import export_head, open_head
from eagle_jax.heads.rows import PackedRows
from eagle_jax.models.devices import check_memory
from eagle_jax.training.checkpoint import writing_run
from eagle_jax.training.conversations import read_examples
from eagle_jax.training.encode import encode_examples
from eagle_jax.training.packing import pack, rows_at
from examples.embedded_pair import corpus
from examples.embedded_pair.export_target import export_target
from examples.embedded_pair.loop import (
    begin_log,
    check_output,
    check_sizes,
    read_settings,
    take_steps,
)
from examples.embedded_pair.pair_step import (
    PairParams,
    PairRows,
    TogetherConfig,
    own_rows,
    pair_losses,
    pair_step,
    source_rows,
)
from examples.embedded_pair.training import PretrainState, deepen, first_state

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def run() -> int:
        arguments = _parse(argv)
        config = read_settings(TogetherConfig, arguments)
        with writing_run(arguments.output):
            return _train(arguments, config)

    return run_command(
        run,
        unwritable="{error}; a run that has begun goes on with --resume",
        interrupted="interrupted; --resume goes on from the last checkpoint",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Train a small target further, with its head.")
    add = parser.add_argument
    add("--config", type=Path, help="settings from a TOML file; flags win")
    add("--run", type=Path, required=True, help="finished run of pretrain.py")
    add("--head", type=Path, required=True, help="folder of an EAGLE-1/2 head for it")
    add("--num-layers", type=int, help="deepen the target to so many layers first")
    add("--texts", type=Path, nargs="+", required=True, help="texts of the target")
    add("--output", type=Path, required=True, help="folder of the new run")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--library", type=Path, help="another folder of Python sources")
    add_settings(
        parser,
        TogetherConfig,
        *("steps", "batch_size", "row_length", "learning_rate", "eval_every", "seed"),
    )
    return parser.parse_args(argv)


def _train(arguments: argparse.Namespace, config: TogetherConfig) -> int:
    output, run = arguments.output, config.run
    check_output(output, resume=arguments.resume)
    folder = arguments.run / "model"
    if not folder.is_dir():
        raise InputError(f"--run: {arguments.run} holds no model/; give a finished run")
    target, target_params = checkpoints.load_target(folder)
    opened = open_head(arguments.head, target)
    head, head_params = opened.head, opened.load(target_params)
    if head_params.embedding is not None:
        raise InputError(
            f"{arguments.head} holds a head with an embedding table of its own; give "
            "one that was trained for the target"
        )
    if arguments.num_layers is not None:
        target_params = deepen(target_params, arguments.num_layers)
        target = dataclasses.replace(target, num_layers=arguments.num_layers)
    check_memory(target, "float32")
    streams = _streams(arguments.library, folder)
    check_sizes(streams, run)
    own = _own_texts(arguments.texts, folder, target.vocab_size, run.row_length)
    facts = {
        "tokens": {name: stream.fingerprint() for name, stream in streams.items()},
        "texts": corpus.fingerprint(own.tokens),
        "target": str(folder.resolve()),
        "head": str(arguments.head.resolve()),
        "num_layers": target.num_layers,
    }
    begin_log(output, config, facts)
    sizes = {"target": target, "head": head}
    step = functools.partial(pair_step, config=config, **sizes)
    state, found = take_steps(
        run,
        first_state(run, PairParams(target=target_params, head=head_params)),
        batch=_batches(config, streams["train"], own),
        step=jax.jit(step, donate_argnums=(0,)),
        measure=_measure(config, streams["held_out"], sizes),
        folder=output / "checkpoints",
    )
    _export(output, folder, state.params, sizes)
    figures = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    print(f"{output} | held out: {figures}")
    return 0


def _streams(library: Path | None, folder: Path) -> dict[str, corpus.TokenStream]:
    """Returns the library's source as tokens of a model."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    train, held_out = corpus.library_files(library)
    return {
        name: corpus.token_stream(tokenizer, list(corpus.read_texts(files)))
        for name, files in (("train", train), ("held_out", held_out))
    }


def _own_texts(
    paths: list[Path], folder: Path, vocab_size: int, row_length: int
) -> PackedRows:
    """Returns texts of the target, packed as heads learn them."""
    examples = [example for path in paths for example in read_examples(path).examples]
    encoded = encode_examples(
        examples,
        load_tokenizer(folder, vocab_size),
        max_length=row_length,
        vocab_size=vocab_size,
    )
    rows = pack(encoded.samples, row_length)
    say(f"texts of the target: {encoded.summary()} | {len(rows)} rows")
    return rows


def _batches(
    config: TogetherConfig, source: corpus.TokenStream, own: PackedRows
) -> Callable[[int], PairRows]:
    """Returns the function from a step's number to its rows."""
    run, half = config.run, config.run.batch_size // 2

    def batch(number: int) -> PairRows:
        first = source_rows(source.rows(run.row_length, half, number, run.seed))
        second = own_rows(own[rows_at(len(own), number, half, run.seed)])
        return jax.tree.map(lambda *x: np.concatenate(x), first, second)

    return batch


def _measure(
    config: TogetherConfig, held_out: corpus.TokenStream, sizes: dict[str, Any]
) -> Callable[[PretrainState], dict[str, float]]:
    """Returns the function from a state to its figures on held-out source."""
    run = config.run
    rows = held_out.spread(run.eval_rows, run.row_length)
    losses = jax.jit(functools.partial(pair_losses, loss=config.loss, **sizes))

    def measure(state: PretrainState) -> dict[str, float]:
        found = [losses(state.params, source_rows(row[None]), None) for row in rows]
        entropy, _, metrics = zip(*found, strict=True)
        return {
            "perplexity": float(np.exp(np.mean(entropy))),
            "agreement": float(np.mean([x.agreement for x in metrics])),
        }

    return measure


def _export(
    output: Path, begun: Path, params: PairParams, sizes: dict[str, Any]
) -> None:
    """Writes both models; the tokenizer is that of the target's beginning."""

    def tokenizer(folder: Path) -> None:
        for name in _TOKENIZER_FILES:
            if (begun / name).is_file():
                shutil.copy(begun / name, folder / name)

    export_target(
        output / "model",
        sizes["target"],
        params.target,
        checkpoints.Export(dtype="bfloat16", also=tokenizer, overwrite=True),
        stop_tokens=(0,),
        bos_token=0,
    )
    how = checkpoints.Export(with_pickle=False, overwrite=True)
    export_head(output / "head", sizes["head"], params.head, how)


if __name__ == "__main__":
    sys.exit(main())
