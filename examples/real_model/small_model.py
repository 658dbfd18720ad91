"""Train a small model of two layers on a target's own answers, to draft for it.

    python -m examples.real_model.small_model --target model.gguf \
        --data answers-0.jsonl answers-1.jsonl --output RUN

The run's folder gets `model/`, with the target's tokenizer, for `--method small-model`.
The same command with `--resume` goes on where it was stopped.
"""

import argparse
import dataclasses
import functools
import shutil
import sys
from pathlib import Path

import jax
import numpy as np

from eagle_jax import checkpoints
from eagle_jax.cli.command import Parser, run_command
from eagle_jax.cli.settings import add_settings
from eagle_jax.errors import InputError
from eagle_jax.training.checkpoint import writing_run
from eagle_jax.training.conversations import fingerprint, read_examples
from examples.embedded_pair.export_target import export_target
from examples.embedded_pair.loop import (
    begin_log,
    check_output,
    read_settings,
    take_steps,
)
from examples.embedded_pair.training import (
    PretrainConfig,
    PretrainState,
    init_state,
    next_token_loss,
    pretrain_step,
)

_TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens_map.json")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(description="Train a small model on a target's own answers.")
    add = parser.add_argument
    add("--config", type=Path, help="settings from a TOML file; flags win")
    add("--target", required=True, help="what answered; its tokenizer is taken")
    add("--data", type=Path, nargs="+", required=True, help="answers, with their ids")
    add("--output", type=Path, required=True, help="folder of the run")
    add("--resume", action="store_true", help="go on with the run in --output")
    names = ("steps", "batch_size", "row_length", "learning_rate", "eval_every", "seed")
    add_settings(parser, PretrainConfig, *names)

    def run() -> int:
        arguments = parser.parse_args(argv)
        with writing_run(arguments.output):
            return _train(arguments, read_settings(PretrainConfig, arguments))

    return run_command(run, interrupted="interrupted; --resume goes on")


def _train(arguments: argparse.Namespace, config: PretrainConfig) -> int:
    output: Path = arguments.output
    check_output(output, resume=arguments.resume)
    folder = checkpoints.resolve(arguments.target)
    size = checkpoints.target_config(folder).vocab_size
    model = dataclasses.replace(config.model, vocab_size=size)
    config, length = dataclasses.replace(config, model=model), config.run.row_length
    begin_log(output, config, {"data": [fingerprint(path) for path in arguments.data]})
    examples = [one for path in arguments.data for one in read_examples(path).examples]
    ids = np.concatenate([one.ids for one in examples if one.ids is not None])
    rows = ids[: len(ids) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    # From all files.
    is_held_out = np.arange(len(rows)) % 50 == 0
    held_out, rows = rows[is_held_out], rows[~is_held_out]
    if len(rows) < config.run.batch_size:
        raise InputError(f"{len(ids)} tokens are too few for a batch")

    def batch(step: int) -> np.ndarray:
        epoch, place = divmod(step * config.run.batch_size, len(rows))
        order = np.random.default_rng((config.run.seed, epoch)).permutation(len(rows))
        return rows[np.resize(np.roll(order, -place), config.run.batch_size)]

    sizes = model.transformer()
    measure = jax.jit(next_token_loss, static_argnames=("config",))
    step = jax.jit(functools.partial(pretrain_step, config=config), donate_argnums=(0,))

    def perplexity(state: PretrainState) -> dict[str, float]:
        losses = [measure(state.params, row[None], sizes) for row in held_out]
        return {"perplexity": float(np.exp(np.mean(losses)))}

    state, found = take_steps(
        config.run,
        init_state(config),
        batch=batch,
        step=step,
        measure=perplexity,
        folder=output / "checkpoints",
    )

    def copy_tokenizer(into: Path) -> None:
        for path in (path for name in _TOKENIZER for path in folder.glob(name)):
            shutil.copy(path, into)

    how = checkpoints.Export(dtype="bfloat16", also=copy_tokenizer, overwrite=True)
    stops = checkpoints.stop_tokens(folder)
    export_target(output / "model", sizes, state.params, how, stop_tokens=stops)
    print(f"{output / 'model'} | held-out perplexity {found['perplexity']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
