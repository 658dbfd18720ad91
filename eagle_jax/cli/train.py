"""Trains a head that drafts for a target.

    eagle-jax train --target FOLDER --data chats.jsonl --output RUN
    eagle-jax train ... --kind eagle3    # or medusa, hydra, dflash, dspark
    eagle-jax train ... --alignment 3 --top-k-loss 10    # HASS
    eagle-jax train ... --mesh data=2,tensor=4

The run's folder gets `head/`, the best head in the official format, beside the log
and the checkpoints. The same command with `--resume` goes on where it was
stopped, bit for bit.
"""

import argparse
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax

from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.cli.command import Parser, command, say
from eagle_jax.cli.files import DATA
from eagle_jax.cli.pair_flags import add_flags
from eagle_jax.cli.processes import add_mesh_flags, join, mesh_shape
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_groups, with_flags
from eagle_jax.config import TreeConfig, load_config
from eagle_jax.engine import Request
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.open import open_pair
from eagle_jax.errors import InputError
from eagle_jax.evaluation.fit import calibrate_pair, calibration_file
from eagle_jax.files import write_json
from eagle_jax.heads import HEADS
from eagle_jax.heads.block import BlockHead
from eagle_jax.training.checkpoint import writing_run
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.loop import Trained
from eagle_jax.training.trainer import TrainJob, train_head

# Settings of heads and losses, of which each kind has some.
_OF_KINDS = {
    "the head, each of some kinds": "draft_heads head_layers draft_vocab_size "
    "feature_layers has_feature_norms norm_before_fc norm_before_residual "
    "recycles_normed qk_norm sliding_window num_layers block_size mask_token "
    "markov_rank",
    "the loss, each of some kinds": "alignment top_k_loss token_loss loss_vocab_size "
    "noise anchors gamma block_loss",
}
_GROUPS = {
    "data": "row_length held_out cache_features",
    "steps": "steps batch_size learning_rate warmup_steps seed dtype",
    "log and checkpoints": "log_every eval_every keep",
}


@command(
    unwritable="{error}; a run that has begun goes on with --resume",
    interrupted="interrupted; --resume goes on from the last checkpoint",
)
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    is_first = join(arguments)
    config = _config(arguments)
    with writing_run(arguments.output) if is_first else contextlib.nullcontext():
        _train(arguments, config, is_first=is_first)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add_flags(parser, "config")
    add_flags(parser, "target", required=True, help="a Hugging Face folder or hub name")
    add("--data", type=Path, required=True, nargs="+", help=DATA)
    instead = "evaluate on these files instead of a share of the data"
    add("--held-out-data", type=Path, nargs="+", default=[], help=instead)
    add("--output", type=Path, required=True, help="folder of the run")
    default = "the default, eagle2, is EAGLE-1/2, whose heads are the same, and hydra "
    default += "is Hydra++ with its prefix layer"
    add("--kind", choices=tuple(HEADS), help=f"the kind of head; {default}")
    add("--begin-with", help="folder or hub name of a head that is trained further")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--overwrite", action="store_true", help="replace the run in --output")
    # What kinds share is described by the class that they inherit, or by the last one.
    own = [one for kind in HEADS.values() for one in (kind.Loss, kind.Settings)]
    more = [base for table in reversed(own) for base in table.mro()[-2::-1]]
    add_groups(parser, TrainConfig, _OF_KINDS | _GROUPS, more=more)
    add_mesh_flags(parser)
    return parser.parse_args(argv)


def _config(arguments: argparse.Namespace) -> TrainConfig:
    """Returns all settings, or refuses flags that the kind of head has no use for."""
    path, kind = arguments.config, arguments.kind
    config = TrainConfig() if path is None else load_config(path, TrainConfig)
    if kind not in (None, config.head.kind):
        if (config.head, config.loss) != (TrainConfig().head, TrainConfig().loss):
            raise InputError(
                f"{path} has settings of a head of kind {config.head.kind}, which "
                f"--kind {kind} is not; leave the flag out, or give another file"
            )
        settings = HEADS[kind].Settings()
        config = dataclasses.replace(config, head=settings, loss=None)
    known = vars(config.head) | vars(config.loss)
    for name in " ".join(_OF_KINDS.values()).split():
        if getattr(arguments, name) is not None and name not in known:
            raise InputError(
                f"--{name.replace('_', '-')}: heads of kind {config.head.kind} have no "
                "use for it; leave it out"
            )
    return with_flags(config, arguments)


def _train(
    arguments: argparse.Namespace, config: TrainConfig, *, is_first: bool
) -> None:
    shown: dict[str, Any] = {"report": say, "progress": progress} if is_first else {}
    arguments.mesh = mesh_shape(arguments)
    names = (field.name for field in dataclasses.fields(TrainJob))
    job = TrainJob(**{name: getattr(arguments, name) for name in names})
    trained = train_head(job, config, **shown)
    # Trees of a block cost no further pass: what ranks them is all there is.
    is_block = isinstance(trained.step_config.head, BlockHead)
    if is_block and jax.process_count() == 1:
        _calibrate(arguments.target, trained)
    if is_first:
        folder = job.output / "checkpoints"
        steps = sorted(
            int(one.name) for one in folder.iterdir() if one.name.isdecimal()
        )
        say(
            f"{trained.head.name}/ is the best of checkpoints "
            f"{', '.join(map(str, steps))}; for another: eagle-jax export "
            f"--checkpoint {folder / str(steps[-1])} --output FOLDER"
        )
    print(f"{trained.head} | {trained.summary}")


def _calibrate(target: str, trained: Trained) -> None:
    """Fits the confidences of a head to the held-out prompts, beside its weights."""
    run, levels = trained.config.run, trained.step_config.head.max_levels or 8
    tree = TreeConfig(num_nodes=60, depth=min(levels, 8), width=6, calibration="none")
    config = PairConfig(
        tree=tree,
        method=trained.config.kind.name,
        dtype=run.dtype,
        request=Request(max_new_tokens=max(run.eval_new_tokens, 2)),
    )
    prompts = [list(prompt) for prompt in trained.data.prompts]
    say("calibrating its confidences")
    pair = open_pair(target, str(trained.head), config).load()
    fits = calibrate_pair(pair, config, prompts, progress)
    origin = [f"{len(prompts)} held-out prompts of the run that trained the head"]
    vocab_size = trained.step_config.head.vocab_size
    content = calibration_file(vocab_size, fits, origin)
    write_json(trained.head / CALIBRATION_FILE, content)
