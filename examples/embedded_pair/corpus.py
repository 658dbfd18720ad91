"""The source of the Python standard library: text that every Python machine has."""

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.errors import InputError

END_OF_TEXT = "<|endoftext|>"
"""Stands before each file, and so behind the one before."""

HELD_OUT = (
    *("bisect", "calendar", "colorsys", "csv", "fractions", "graphlib", "heapq"),
    *("json/decoder", "json/encoder", "mailbox", "queue", "sched", "shelve", "shlex"),
    *("statistics", "string", "tabnanny", "textwrap", "this", "timeit", "wave"),
)
"""Modules that are never trained on, nor are their tests."""

# Tables and recorded data rather than code; they would fill the vocabulary.
_LEFT_OUT = (
    *("pydoc_data/", "encodings/", "lib2to3/tests/data/", "site-packages/"),
    *("test/encoded_modules/", "idlelib/idle_test/", "ensurepip/_bundled/"),
)
_MAX_BYTES = 200_000
_CONTEXT = 350  # Characters before a prompt's function, about.
_DEFINITION = re.compile(r"^( {0,4})def \w+\(.*\):\n", re.MULTILINE)
_NEWLINE = "\u010a"  # As byte-level BPE writes it.


def library_files(root: Path | None = None) -> tuple[list[Path], list[Path]]:
    """Lists the modules of the standard library.

    Args:
        root: Its folder; that of the running Python by default.

    Returns:
        Files to train on, and the files of `HELD_OUT`, both in alphabetical order.

    Raises:
        InputError: If the folder holds no such files.
    """
    root = root or _library()
    kept: list[Path] = []
    held_out: list[Path] = []
    for module, path in _modules(root):
        # A module may have become a package, or be both.
        if module.removesuffix("/__init__") in HELD_OUT:
            held_out.append(path)
        elif not _is_test_of_held_out(module):
            kept.append(path)
    if not kept or not held_out:
        raise InputError(f"{root} is no folder of Python's standard library")
    return kept, held_out


def held_out_tests(root: Path | None = None) -> list[Path]:
    """Lists the tests of `HELD_OUT`: neither trained on nor evaluated on.

    Args:
        root: As for `library_files`.
    """
    every = _modules(root or _library())
    return [path for module, path in every if _is_test_of_held_out(module)]


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Reads files as text; files in other encodings than UTF-8 are passed over."""
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Trains a byte-level BPE tokenizer that puts `END_OF_TEXT` before each text.

    Args:
        texts: To learn merges from.
        vocab_size: Ids, the 256 bytes and `END_OF_TEXT` (id 0) included.

    Returns:
        A `tokenizers.Tokenizer`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers import trainers as bpe_trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = bpe_trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields names and files of source code, in alphabetical order."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(_LEFT_OUT) or "/data/" in name:
            continue
        if 64 <= path.stat().st_size <= _MAX_BYTES:
            yield name.removesuffix(".py"), path


def _is_test_of_held_out(module: str) -> bool:
    last = module.rsplit("/", 1)[-1]
    modules = {name.rsplit("/", 1)[-1] for name in HELD_OUT} | {"json"}
    if "/test_json/" in f"/{module}":
        return True
    return last.removeprefix("test_") in modules and last.startswith("test_")


def fingerprint(tokens: np.ndarray) -> str:
    """Returns 16 hexadecimal digits that tell arrays of tokens apart."""
    return hashlib.sha256(tokens.astype(np.int32).tobytes()).hexdigest()[:16]


class TokenStream:
    """Texts as one stream of tokens, cut into rows that start at line starts.

    Attributes:
        tokens: `[M]` uint16 or int32, every text with `END_OF_TEXT` before it.
        starts: Ascending positions in `tokens` where a line starts.
    """

    def __init__(self, tokens: np.ndarray, is_line_end: np.ndarray) -> None:
        """Takes `tokens [M]` and whether each id ends a line, `[V]` bool."""
        self.tokens = tokens
        ends = np.flatnonzero(is_line_end[tokens])
        self.starts = np.concatenate([[0], ends[ends + 1 < len(tokens)] + 1])

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that tell streams apart."""
        return fingerprint(self.tokens)

    def spread(self, count: int, row_length: int) -> np.ndarray:
        """Returns rows `[count, T + 1]` evenly spread over the stream."""
        last = len(self.tokens) - row_length
        return self.cut(np.linspace(0, last, count).astype(np.int64), row_length)

    def num_rows(self, row_length: int) -> int:
        """Returns rows per epoch."""
        return (len(self.tokens) - 1) // row_length - 1

    def rows(
        self, row_length: int, batch_size: int, step: int, seed: int
    ) -> np.ndarray:
        """Returns the batch of a step, a pure function of step and seed.

        Args:
            row_length: `T`.
            batch_size: `B`.
            step: Counted from 0, over all epochs.
            seed: Of the order, which differs in each epoch, as do the cuts.

        Returns:
            `[B, T + 1]` int32: `END_OF_TEXT`, then tokens from a line start on.
        """
        per_epoch = self.num_rows(row_length) // batch_size
        epoch, index = divmod(step, per_epoch)
        random = np.random.default_rng((seed, epoch))
        offset = random.integers(row_length)
        order = random.permutation(self.num_rows(row_length))
        chosen = order[index * batch_size : (index + 1) * batch_size]
        return self.cut(offset + chosen * row_length, row_length)

    def cut(self, wanted: np.ndarray, row_length: int) -> np.ndarray:
        """Returns rows `[B, T + 1]` that start at the last line start before each."""
        starts = self.starts[np.searchsorted(self.starts, wanted, side="right") - 1]
        inside = self.tokens[starts[:, None] + np.arange(row_length)]
        first = np.zeros((len(wanted), 1))
        return np.concatenate([first, inside], axis=1).astype(np.int32)


def token_stream(tokenizer: Any, texts: Sequence[str]) -> TokenStream:
    """Encodes texts as one stream.

    Args:
        tokenizer: From `train_tokenizer`.
        texts: Each gets `END_OF_TEXT` before it.
    """
    encoded = tokenizer.encode_batch(list(texts))
    tokens = np.concatenate([np.array(one.ids, np.int32) for one in encoded])
    names = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    return TokenStream(tokens, np.array([name.endswith(_NEWLINE) for name in names]))


def pieces(text: str, length: int) -> list[str]:
    """Cuts a text into pieces, before a line that starts a top-level statement.

    Args:
        text: Source of a module.
        length: Characters of a piece, reached before the next such line is taken;
            a piece without one is cut before any line at twice the length.

    Returns:
        Pieces that together are the text.
    """
    cut: list[str] = []
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        starts_statement = line[:1].isalpha() or line[:1] in "@_"
        if size >= length and (starts_statement or size >= 2 * length):
            cut.append("".join(lines))
            lines, size = [], 0
        lines.append(line)
        size += len(line)
    return [*cut, "".join(lines)] if lines else cut


def prompts(texts: Iterable[str]) -> list[str]:
    """Returns passages to continue, up to three per text, each ending with a `def`.

    Args:
        texts: Sources of modules.

    Returns:
        100 to 900 characters each, what stands before the function included.
    """
    found: list[str] = []
    for text in texts:
        starts = [m for m in _DEFINITION.finditer(text) if m.start() > _CONTEXT]
        count = min(3, len(starts))
        for number in range(count):
            match = starts[(2 * number + 1) * len(starts) // (2 * count)]
            first = text.rfind("\n\n", 0, max(0, match.start() - _CONTEXT)) + 2
            found.append(text[first : match.end()].lstrip("\n"))
    return [passage for passage in found if 100 < len(passage) < 900]
