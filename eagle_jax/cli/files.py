"""Files that flags name: prompts, and outputs that are checked before long work."""

import tempfile
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.files import is_special, unfinished, writing
from eagle_jax.parsing import parse_json, resolved, value_at

DATA = "ShareGPT .json, messages or text .jsonl, .txt divided by <|endoftext|> lines"
_PROBE = bytes(4096)
"""The bytes that are written to find out whether a disk is full."""


def read_prompts(path: Path) -> list[str]:
    """Reads prompts by the file's suffix.

    Args:
        path: A file of type `.txt` (a prompt per line, empty lines skipped), `.json`
            (a list of strings) or `.jsonl` (objects with `prompt`, or with `turns` or
            `messages`, of which the user's first is taken).

    Returns:
        The prompts, at least one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompts {path}: {error}") from error
    if path.suffix == ".txt":
        # Not splitlines: a prompt may hold other line separators.
        prompts = [line for line in text.split("\n") if line.strip()]
    elif path.suffix == ".json":
        prompts = parse_json(text, f"{path}")
        if not isinstance(prompts, list):
            raise InputError(f"{path} must hold a JSON list of strings")
    elif path.suffix == ".jsonl":
        prompts = [*map(_first_turn, _records(path, text))]
    else:
        raise InputError(f"{path} must end in .txt, .json or .jsonl")
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            raise InputError(
                f"{path}: prompt {number} is {prompt!r}, not a string; objects of a "
                ".jsonl file need `prompt` or `turns`"
            )
    if not prompts:
        raise InputError(f"{path} holds no prompt")
    return prompts


def read_settings(path: Path) -> list[dict[str, Any]]:
    """Returns what the prompts that `read_prompts` returned ask for.

    Objects of a `.jsonl` file may have `settings`, an object.
    """
    if path.suffix != ".jsonl":
        return [{} for _ in read_prompts(path)]
    records = _records(path, path.read_text(encoding="utf-8-sig"))
    found = [value_at(record, "settings") or {} for record in records]
    for number, settings in enumerate(found, 1):
        if not isinstance(settings, dict):
            raise InputError(f"{path}: settings of prompt {number} are no object")
    return found


def check_writable(path: Path) -> None:
    """Refuses an output path before any long work starts; nothing is left there."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; give a file name")
    if path.is_fifo() or path.is_socket():
        return  # A pipe's reader would take an attempt for the output.
    with writing(path):
        if is_special(path):
            with path.open("wb", buffering=0) as device:
                device.write(b"")  # Enough for /dev/full.
        else:
            with unfinished(resolved(path)) as part:
                part.write_bytes(_PROBE)


def check_folder(path: Path) -> None:
    """Refuses an output folder before any long work starts; it need not exist."""
    existing = resolved(path)
    try:
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            file.write(_PROBE)
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}; give a folder that can be made "
            "and written to"
        ) from error


def _records(path: Path, text: str) -> list[Any]:
    """Returns the lines of a `.jsonl` file but for the settings of who wrote it."""
    # Not splitlines: a prompt may hold other line separators.
    lines = enumerate(text.split("\n"), 1)
    found = [parse_json(x, f"{path}, line {n}") for n, x in lines if x.strip()]
    return [record for record in found if value_at(record, "run") is None]


def _first_turn(record: Any) -> Any:
    """Returns a record's prompt, or the record itself where it has none."""
    if not isinstance(record, dict):
        return record
    messages = record.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if value_at(message, "role") == "user":
            return value_at(message, "content")
    turns = record.get("turns")
    if isinstance(turns, list) and turns:
        return turns[0]
    return record.get("prompt", record)
