"""Fits a draft's confidences to what its target accepts, for greedy and sampled text.

    eagle-jax calibrate --target FOLDER --draft FOLDER --prompts FILE

The pair continues the prompts, which neither model should have been trained on, and
every drafted tree is looked at. No deeper tree can be calibrated with the fit. As
`calibration.json` in the folder of a head, it is used by default. Without a target the
embedded pair is calibrated.
"""

import argparse
import dataclasses
from pathlib import Path

from eagle_jax.cli.command import Parser, command
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.pair_flags import add_pair_flags, open_measured
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.config import TreeConfig, require
from eagle_jax.engine.config import PairConfig
from eagle_jax.evaluation.fit import calibrate_pair, calibration_file, describe
from eagle_jax.files import write_json
from eagle_jax.methods import METHODS

_METHODS = [name for name, row in METHODS.items() if row.settings is TreeConfig]


@command(unwritable="cannot write the calibration: {error}")
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    check_writable(arguments.output)
    config = join_settings(None, arguments)
    new_tokens = config.request.max_new_tokens
    require(new_tokens >= 2, "--max-new-tokens", new_tokens, "at least 2")
    require(config.own.levels >= 1, "--depth", config.own.levels, "at least 1")
    # What is decoded with has calibrations of its own.
    tree = dataclasses.replace(config.own, calibration="none")
    config = dataclasses.replace(config, tree=tree)
    pair, prompts = open_measured(arguments, config, least=1)
    fits = calibrate_pair(pair, config, prompts, progress)
    origin = [
        f"target {arguments.target}, draft {arguments.draft}",
        f"{len(prompts)} prompts of {arguments.prompts}, {new_tokens} tokens each",
    ]
    write_json(arguments.output, calibration_file(pair.vocab_size, fits, origin))
    for kind, fitted in fits.items():
        print(f"{kind}: {describe(fitted)}")
    print(f"wrote {arguments.output}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_pair_flags(parser)
    add = parser.add_argument
    what = "the method whose trees are looked at"
    add("--method", choices=_METHODS, default=PairConfig.method, help=what)
    names = ("num_nodes", "depth", "width", "max_new_tokens", "batch_size", "dtype")
    usual = {"num_nodes": 60, "depth": 8, "width": 6, "batch_size": 8}
    add_settings(parser, PairConfig, *names, usual=usual)
    output, written = Path("calibration.json"), "the calibration"
    add("--output", type=Path, default=output, metavar="FILE", help=written)
    return parser.parse_args(argv)
