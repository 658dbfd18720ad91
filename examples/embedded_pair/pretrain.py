"""Train a small target from scratch on the source of Python's standard library.

    python -m examples.embedded_pair.pretrain --output RUN

The run's folder gets `model/`, a Hugging Face folder, `prompts.json` and
`calibration_prompts.json`, held-out passages to continue, and `train.jsonl` and
`held_out.jsonl`, the texts in pieces, for `eagle-jax regenerate` and `eagle-jax train`.
The same command with `--resume` goes on where it was stopped.
"""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax import checkpoints
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.settings import add_settings
from eagle_jax.errors import InputError
from eagle_jax.files import write_json, write_whole
from eagle_jax.models.devices import check_memory
from eagle_jax.training.checkpoint import writing_run
from examples.embedded_pair import corpus
from examples.embedded_pair.export_target import export_target
from examples.embedded_pair.loop import (
    begin_log,
    check_output,
    check_sizes,
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

_PIECE_LENGTH = 1500


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def run() -> int:
        arguments = _parse(argv)
        config = read_settings(PretrainConfig, arguments)
        with writing_run(arguments.output):
            return _pretrain(arguments, config)

    return run_command(
        run,
        unwritable="{error}; a run that has begun goes on with --resume",
        interrupted="interrupted; --resume goes on from the last checkpoint",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Train a small target on the source of the standard library."
    )
    add = parser.add_argument
    add("--config", type=Path, help="settings from a TOML file; flags win")
    add("--output", type=Path, required=True, help="folder of the run")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--tokenizer", type=Path, help="folder of a model whose tokenizer to use")
    add("--library", type=Path, help="another folder of Python sources")
    add_settings(
        parser,
        PretrainConfig,
        *("steps", "batch_size", "row_length", "learning_rate", "eval_every", "seed"),
    )
    return parser.parse_args(argv)


def _pretrain(arguments: argparse.Namespace, config: PretrainConfig) -> int:
    output: Path = arguments.output
    check_output(output, resume=arguments.resume)
    check_memory(config.model.transformer(), "float32")
    train_files, held_files = corpus.library_files(arguments.library)
    texts = {
        "train": list(corpus.read_texts(train_files)),
        "held_out": list(corpus.read_texts(held_files)),
    }
    tokenizer = _tokenizer(arguments.tokenizer, texts["train"], config, output)
    streams = {name: corpus.token_stream(tokenizer, x) for name, x in texts.items()}
    check_sizes(streams, config.run)
    tokens = {name: stream.fingerprint() for name, stream in streams.items()}
    begin_log(output, config, {"tokens": tokens})
    write_whole(output / "tokenizer.json", lambda part: tokenizer.save(str(part)))
    for name, part in texts.items():
        pieces = [p for text in part for p in corpus.pieces(text, _PIECE_LENGTH)]
        # Mixed, so that the first few are a sample of all.
        order = np.random.default_rng(config.run.seed).permutation(len(pieces))
        pieces = [pieces[number] for number in order]
        lines = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
        write_whole(output / f"{name}.jsonl", lines)
        say(
            f"{name}: {len(part)} files, {len(streams[name].tokens)} tokens, "
            f"{len(pieces)} pieces"
        )
    write_json(output / "prompts.json", corpus.prompts(texts["held_out"]))
    tests = corpus.read_texts(corpus.held_out_tests(arguments.library))
    # Every second: enough to calibrate a head with.
    write_json(output / "calibration_prompts.json", corpus.prompts(tests)[::2])
    state, perplexity = _train(config, streams, output / "checkpoints")
    model_folder = output / "model"
    export_target(
        model_folder,
        config.model.transformer(),
        state.params,
        checkpoints.Export(
            dtype="bfloat16",
            also=lambda folder: _write_tokenizer(tokenizer, folder),
            overwrite=True,
        ),
        stop_tokens=(0,),
        bos_token=0,
    )
    print(f"{model_folder} | held-out perplexity {perplexity:.2f} per token")
    return 0


def _tokenizer(
    folder: Path | None, texts: list[str], config: PretrainConfig, output: Path
) -> Any:
    """Returns the tokenizer of a model, of this run, or a new one."""
    from tokenizers import Tokenizer

    path = (folder or output) / "tokenizer.json"
    if path.is_file():
        tokenizer = Tokenizer.from_file(str(path))
    elif folder is not None:
        raise InputError(f"{folder} holds no tokenizer.json")
    else:
        say("training the tokenizer")
        tokenizer = corpus.train_tokenizer(texts, config.model.vocab_size)
    if tokenizer.get_vocab_size() > config.model.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.get_vocab_size()} ids, but vocab_size = "
            f"{config.model.vocab_size}"
        )
    return tokenizer


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer as `transformers` reads it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token"), corpus.END_OF_TEXT)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    write_json(folder / "tokenizer_config.json", settings)


def _train(
    config: PretrainConfig,
    streams: dict[str, corpus.TokenStream],
    folder: Path,
) -> tuple[PretrainState, float]:
    run, length = config.run, config.run.row_length
    step = jax.jit(functools.partial(pretrain_step, config=config), donate_argnums=(0,))
    measure = jax.jit(next_token_loss, static_argnames=("config",))
    held_out = streams["held_out"].spread(run.eval_rows, length)

    def perplexity(state: PretrainState) -> dict[str, float]:
        sizes = config.model.transformer()
        losses = [measure(state.params, row[None], sizes) for row in held_out]
        return {"perplexity": float(np.exp(np.mean(losses)))}

    state, found = take_steps(
        run,
        init_state(config),
        batch=lambda n: streams["train"].rows(length, run.batch_size, n, run.seed),
        step=step,
        measure=perplexity,
        folder=folder,
    )
    return state, found["perplexity"]


if __name__ == "__main__":
    sys.exit(main())
