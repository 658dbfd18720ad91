"""Writes training data by the target itself (EAGLE-1, table 6).

    eagle-jax regenerate --target FOLDER --data FILE --output out.jsonl
    eagle-jax regenerate --target FOLDER --samples 900 --temperature 1 --output FILE
    eagle-jax regenerate --target FOLDER --questions 900 --temperature 1 --output FILE

Answers of the data are replaced by the target's own; `--samples` writes texts from
the start token alone, `--questions` what users might ask, to be answered next. With
`--draft` the target decodes speculatively: the same texts, sooner. The same command,
run again, goes on where it was stopped.
"""

import argparse
import dataclasses
from pathlib import Path

from eagle_jax.cli.command import Parser, command, say
from eagle_jax.cli.files import DATA, check_writable
from eagle_jax.cli.pair_flags import add_flags
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.engine.config import PairConfig
from eagle_jax.training.regenerate import RegenerateJob, regenerate_file


@command(interrupted="interrupted; the same command goes on from here")
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    config = join_settings(None, arguments)
    check_writable(arguments.output)
    names = (field.name for field in dataclasses.fields(RegenerateJob))
    job = RegenerateJob(**{name: getattr(arguments, name) for name in names})
    counts = regenerate_file(job, config, report=say, progress=progress)
    print(f"{arguments.output} | {'complete' if counts is None else counts}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add_flags(parser, "target", required=True, help="a Hugging Face folder or hub name")
    add_flags(parser, "draft", help="EAGLE head that makes it quicker")
    add("--data", type=Path, help=DATA)
    add("--samples", type=int, help="without data: texts from the start token alone")
    add("--questions", type=int, help="without data: questions, in its chat template")
    add("--systems", type=Path, help="what the system says before them, a line each")
    add("--output", type=Path, required=True, help="JSON lines; gone on with if there")
    add("--overwrite", action="store_true", help="start the output again")
    add("--min-prefix", type=int, default=1, help="fewest tokens kept of a document")
    add("--max-prefix", type=int, default=64, help="most tokens kept of a document")
    names = "max_new_tokens max_length batch_size dtype temperature top_p top_k min_p"
    names += " seed num_nodes depth width"
    usual = {"max_new_tokens": 512, "batch_size": 16}
    add_settings(parser, PairConfig, *names.split(), usual=usual)
    return parser.parse_args(argv)
