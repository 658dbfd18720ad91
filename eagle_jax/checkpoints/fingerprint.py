"""What tells one checkpoint from another."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from eagle_jax.checkpoints.calibration import CALIBRATION_FILE
from eagle_jax.parsing import read_json

_STORE_LIST = "store.json"  # See `store`.
_WEIGHTS = (".safetensors", ".bin")
_TEXTS = (".json", ".model", ".jinja", ".txt")

_WHOLE_BYTES = 1 << 26
_END_BYTES = 1 << 20  # Headers stand at the beginning, tables of pickles at the end.
_BLOCKS, _BLOCK_BYTES = 1 << 10, 1 << 14


def fingerprint_folder(folder: Path) -> str:
    """Returns what tells one checkpoint from another, without reading all of it.

    Covers the settings and the tokenizer's files whole; of a converted pair the
    checksums of all tensors; of every other file of weights its size and all of its
    bytes or, beyond 64 MiB, a MiB at both ends and 1,024 blocks spread evenly, 16 MiB
    together. A calibration is left out: it changes no weight.

    Args:
        folder: Of a Hugging Face checkpoint or one half of a converted pair, from
            `resolve`.

    Returns:
        32 hexadecimal digits, the same wherever the folder lies.

    Raises:
        InputError: If the list of a converted pair cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == _STORE_LIST:
            # Orbax gives its files other names each time that it writes them.
            listed = read_json(path)
            tensors = [listed.get(name) for name in ("bits", "tensors")]
            digest.update(json.dumps(tensors, sort_keys=True).encode())
        elif path.suffix in _WEIGHTS:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for start, length in _pieces(size):
                    file.seek(start)
                    digest.update(file.read(length))
        elif path.suffix in _TEXTS and path.name != CALIBRATION_FILE:
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Yields the start and the length of what is read of a file, in bytes."""
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    yield 0, _END_BYTES
    for number in range(_BLOCKS):
        yield (size - _BLOCK_BYTES) * number // (_BLOCKS - 1), _BLOCK_BYTES
    yield size - _END_BYTES, _END_BYTES
