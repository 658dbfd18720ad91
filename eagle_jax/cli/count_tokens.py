"""Counts which tokens of a target its texts need: the vocabulary of its drafts.

    eagle-jax count-tokens DATA... --target FOLDER --output HEAD/draft_vocabulary.json

Data are the files that `eagle-jax train` and `regenerate` read, of whose conversations
the answers are counted, and folders of `eagle-jax evaluate`. Best are texts that the
target wrote itself. Without data the tokenizer's own order stands for the counts. As
`draft_vocabulary.json` in the folder of an EAGLE-1/2 head or a small model, the file is
used by default.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax import assets, checkpoints
from eagle_jax.cli.command import Parser, run_command
from eagle_jax.cli.files import check_writable
from eagle_jax.cli.progress import progress
from eagle_jax.errors import InputError
from eagle_jax.evaluation.fields import numbers
from eagle_jax.evaluation.record_files import read_runs
from eagle_jax.files import check_apart, is_special, write_whole
from eagle_jax.generation.tokenizer import load_tokenizer
from eagle_jax.generation.vocabulary import most_frequent, vocabulary_file
from eagle_jax.training.conversations import read_examples
from eagle_jax.training.encode import encode_examples


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(
        lambda: _count(_parse(argv)),
        unwritable="cannot write the draft vocabulary: {error}",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Count which tokens of a target drafts need.")
    add = parser.add_argument
    add(
        "data",
        type=Path,
        nargs="*",
        help="files of texts or conversations, and folders of eagle-jax evaluate",
    )
    add(
        "--target",
        default=str(assets.TARGET),
        help="a Hugging Face folder or hub name; default the embedded target",
    )
    add("--output", type=Path, required=True, metavar="FILE", help="a .json file")
    add("--size", type=int, help="keep as many tokens; default a quarter of all")
    return parser.parse_args(argv)


def _check_paths(data: list[Path], output: Path) -> None:
    """Refuses paths that cannot be read or written before anything is counted."""
    if output.suffix != ".json" and not is_special(output):
        raise InputError(
            f"`output` {output} must end in .json; give such a name, as "
            "HEAD/draft_vocabulary.json"
        )
    check_writable(output)
    check_apart(output, *data)
    for path in data:
        try:
            path.stat()
        except OSError as error:
            raise InputError(
                f"cannot read the data {path}: {error.strerror}; give files of texts "
                "or conversations, or folders of eagle-jax evaluate"
            ) from error


def _count(arguments: argparse.Namespace) -> int:
    _check_paths(arguments.data, arguments.output)
    folder = checkpoints.resolve(arguments.target)
    vocab_size = checkpoints.open_target(folder)[0].vocab_size
    tokenizer = load_tokenizer(folder, vocab_size)
    special = (id_ for id_ in sorted(tokenizer.all_special_ids) if id_ < vocab_size)
    first = [*checkpoints.stop_tokens(folder), *special]
    # A size that is too small is refused before anything is counted.
    counts = np.zeros(vocab_size, np.int64)
    most_frequent(counts, first, arguments.size)
    for path in arguments.data:
        count = _count_records if path.is_dir() else _count_texts
        counts += count(path, tokenizer, vocab_size)
    ids = most_frequent(counts, first, arguments.size)
    source = [str(path) for path in arguments.data]
    write_whole(arguments.output, vocabulary_file(ids, counts, source, tokenizer))
    words = "in the tokenizer's order"
    if counts.any():
        share = counts[ids].sum() / counts.sum()
        words = f"{share:.2%} of the {counts.sum()} tokens counted"
    print(f"wrote {arguments.output}: {len(ids)} of {vocab_size} tokens, {words}")
    return 0


def _count_texts(path: Path, tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Returns how often each token is to be predicted in a file of texts, `[V]`."""
    examples = read_examples(path).examples
    with progress(f"counting {path}", len(examples)) as update:
        encoded = encode_examples(
            examples,
            tokenizer,
            max_length=sys.maxsize,
            vocab_size=vocab_size,
            progress=update,
        )
    counted = [sample.tokens[sample.loss_mask] for sample in encoded.samples]
    return np.bincount(np.concatenate(counted), minlength=vocab_size)


def _count_records(folder: Path, tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Returns how often each token is in the answers of an evaluation, `[V]`."""
    del tokenizer
    counts = np.zeros(vocab_size, np.int64)
    for run in read_runs([folder]):
        known = run.settings.get("vocab_size")
        if known != vocab_size:
            raise InputError(
                f"{run.paths[0]} is of a target with {known} tokens, and this one has "
                f"{vocab_size}; give records of this target"
            )
        for record in run.answers.values():
            for turn in record.turns:
                ids = numbers(vars(turn), "token_ids", int, most=vocab_size - 1)
                counts += np.bincount(np.array(ids, int), minlength=vocab_size)
    return counts
