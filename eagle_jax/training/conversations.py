"""Reading training data: conversations and texts from the files that people have.

`.json` and `.jsonl` files hold a list of records or one record per line, either of
them; a record is one of

* `{"conversations": [{"from": "human", "value": ...}, ...]}` (ShareGPT),
* `{"messages": [{"role": "user", "content": ...}, ...]}`,
* `{"text": ...}`,
* `{"ids": [...], "loss_mask": [...]}`, with or without one of the others beside it:
  exact tokens, as `eagle-jax regenerate` writes them.

`.txt` files hold documents between lines of `<|endoftext|>`.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.parsing import parse_json

Message = dict[str, str]
"""`role` ("system", "user" or "assistant") and `content`, as chat templates want it."""

_KEYS = {"conversations": ("from", "value"), "messages": ("role", "content")}
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}
_SEPARATOR = re.compile(r"^[^\S\n]*<\|endoftext\|>[^\S\n]*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One record of a data file.

    Attributes:
        where: The record's position in the file, for messages.
        messages: A conversation, system turn first if there is one, then user and
            assistant in turn; empty for plain text.
        text: Plain text; `None` where the record holds something else.
        ids: `[n]` int32, the exact tokens where the record has them; they override
            messages and text.
        loss_mask: `[n]` bool, which of the ids are to be predicted; `None` if the
            record does not say.
    """

    where: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    ids: np.ndarray | None = None
    loss_mask: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFile:
    """The examples of a data file, and the records that gave none.

    Attributes:
        examples: The examples, in the file's order.
        left_out: A line for each record that is malformed or teaches nothing, such as a
            conversation without an answer.
    """

    examples: list[Example]
    left_out: list[str]

    def summary(self) -> str:
        """Returns the counts in one line for a log."""
        line = f"{len(self.examples)} examples"
        if self.left_out:
            line += f" | {len(self.left_out)} left out (the first: {self.left_out[0]})"
        return line


class _UnusableError(Exception):
    """The error of a record that is malformed or teaches nothing."""


def read_examples(path: Path, *, need_answers: bool = True) -> DataFile:
    """Reads a data file.

    A conversation's leading assistant turns (frequent in ShareGPT, where long
    conversations are cut) are dropped, and so are user turns that nobody answers.

    Args:
        path: The `.json`, `.jsonl` or `.txt` file; see the module's text.
        need_answers: Whether conversations need answers; if false, user turns without
            one are kept, for a target that is going to answer.

    Returns:
        The file's content, at least one example.

    Raises:
        InputError: If the file cannot be read, or nothing in it is usable.
    """
    if path.suffix not in (".json", ".jsonl", ".txt"):
        raise InputError(
            f"{path} must end in .json or .jsonl, for conversations, messages or text, "
            "or in .txt, for documents between lines of <|endoftext|>"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the data {path}: {error.strerror}") from error
    found = DataFile(examples=[], left_out=[])
    records = _documents if path.suffix == ".txt" else _json_records
    for where, record in records(path, data):
        try:
            found.examples.append(_example(where, record, need_answers))
        except _UnusableError as error:
            found.left_out.append(f"{where}: {error}")
    if not found.examples:
        because = "".join(f"; {line}" for line in found.left_out[:1])
        raise InputError(
            f"{path} holds no usable conversation or text among {len(found.left_out)} "
            f"records{because}; give a file with conversations, messages or text"
        )
    return found


def fingerprint(path: Path) -> str:
    """Returns 32 hexadecimal digits for a data file's bytes."""
    if not path.is_file():
        raise InputError(f"cannot read the data {path}: it is no file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def check_ids(where: str, ids: np.ndarray | None, vocab_size: int | None) -> None:
    """Refuses an example, `where` of a file, with exact ids of another target.

    Args:
        where: The example's position in the file.
        ids: `[n]` int32, its ids; `None` where they are not known.
        vocab_size: The number of tokens the target knows, `V`; `None` if not known.
    """
    if ids is None or vocab_size is None:
        return
    if (highest := int(ids.max(initial=0))) >= vocab_size:
        raise InputError(
            f"{where} has the id {highest}, but the target knows only {vocab_size}; it "
            "was made for another target, or holds a token that its tokenizer adds"
        )


def _documents(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """Yields the texts of a `.txt` file, each with its position."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the data {path}: {error}") from error
    for number, part in enumerate(_SEPARATOR.split(text), 1):
        if part.strip():
            yield f"document {number}", {"text": part.strip()}


def _json_records(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """Yields the records of a JSON list, or JSON lines, each with its position."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.lstrip()[:1] == b"[":
        records = parse_json(data, f"{path} begins as a JSON list but")
        for number, record in enumerate(records, 1):
            yield f"record {number}", record
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        # The first line of what `eagle-jax regenerate` wrote holds its settings.
        if line.strip() and not (number == 1 and line.startswith(b'{"run": {')):
            yield f"line {number}", line


def _example(where: str, record: Any, need_answers: bool) -> Example:
    """Returns a checked record, or one that a line of JSON holds."""
    if isinstance(record, bytes):
        try:
            record = parse_json(record, "it")
        except InputError as error:
            raise _UnusableError(str(error)) from error
    if not isinstance(record, dict):
        raise _UnusableError(f"it is no JSON object but {_short(record)}")
    ids, loss_mask = _ids(record)
    turns = _turns(record)
    if ids is not None:  # Then the turns are only there to be read by people.
        messages = tuple(turns or ())
        return Example(where=where, messages=messages, ids=ids, loss_mask=loss_mask)
    if turns is not None:
        return Example(where=where, messages=tuple(_conversation(turns, need_answers)))
    if "text" not in record:
        raise _UnusableError(
            "it has neither conversations, messages, text nor ids, but "
            f"{_short(', '.join(record)) if record else 'nothing'}"
        )
    text = _check_text(record["text"], "its text")
    if not text.strip():
        raise _UnusableError("its text is empty")
    return Example(where=where, text=text)


def _ids(record: dict[str, Any]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns a record's ids and loss mask, `None` for either that it lacks."""
    if record.get("ids") is None:
        return None, None
    tokens = _integers(record["ids"], "ids", 2**31 - 1)
    if len(tokens) < 2:
        raise _UnusableError("it has less than two ids, of which none is predicted")
    if record.get("loss_mask") is None:
        return tokens.astype(np.int32), None
    mask = _integers(record["loss_mask"], "loss_mask", 1)
    if len(mask) != len(tokens):
        raise _UnusableError(
            f"its loss_mask has {len(mask)} entries for {len(tokens)} ids"
        )
    if not mask.any():
        raise _UnusableError("its loss_mask predicts nothing")
    return tokens.astype(np.int32), mask.astype(np.bool_)


def _integers(values: Any, name: str, highest: int) -> np.ndarray:
    """Returns a list of integers or booleans as an array."""
    if isinstance(values, list) and values:
        is_integer = all(type(value) in (int, bool) for value in values)
        if is_integer and min(values) >= 0 and max(values) <= highest:
            return np.array(values)
    raise _UnusableError(
        f"its {name} must be a list of integers of 0 to {highest}, not {_short(values)}"
    )


def _turns(record: dict[str, Any]) -> list[Message] | None:
    """Returns a record's turns with the usual role names, `None` if it has none."""
    for key, names in _KEYS.items():
        turns = record.get(key)
        if turns is None:
            continue
        if not isinstance(turns, list):
            raise _UnusableError(f"its {key} is no list but {_short(turns)}")
        return [_message(number, turn, *names) for number, turn in enumerate(turns, 1)]
    return None


def _message(number: int, turn: Any, role_key: str, content_key: str) -> Message:
    """Returns one turn, whose text may be in parts as in the OpenAI format."""
    if not isinstance(turn, dict) or not {role_key, content_key} <= set(turn):
        raise _UnusableError(
            f"turn {number} has no {role_key!r} and {content_key!r}: {_short(turn)}"
        )
    role, content = turn[role_key], turn[content_key]
    if not isinstance(role, str) or role not in _ROLES:
        raise _UnusableError(
            f"turn {number} has the unknown role {_short(role)}; known are "
            + ", ".join(_ROLES)
        )
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else 0 for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else content
    content = _check_text(content, f"the text of turn {number}")
    return {"role": _ROLES[role], "content": content}


def _conversation(turns: list[Message], need_answers: bool) -> list[Message]:
    """Returns turns that begin with the user's and alternate, the system's in front."""
    system = turns[:1] if turns and turns[0]["role"] == "system" else []
    rest = turns[len(system) :]
    while rest and rest[0]["role"] == "assistant":
        rest = rest[1:]
    for number, turn in enumerate(rest):
        wanted = ("user", "assistant")[number % 2]
        if turn["role"] != wanted:
            place = len(turns) - len(rest) + number + 1
            raise _UnusableError(f"turn {place} is the {turn['role']}'s, not {wanted}")
    if need_answers and len(rest) % 2:
        rest = rest[:-1]
    if not rest:
        answered = " with an answer" if need_answers else ""
        raise _UnusableError(f"it has no user's turn{answered}")
    for turn in rest:
        if not turn["content"].strip():
            raise _UnusableError(f"a turn of the {turn['role']} is empty")
    return system + rest


def _check_text(text: Any, name: str) -> str:
    """Returns a text, or refuses one that no tokenizer takes, with half characters."""
    if not isinstance(text, str):
        raise _UnusableError(f"{name} is no string but {_short(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _UnusableError(f"{name} is not valid Unicode text") from error
    return text


def _short(value: Any) -> str:
    """Returns a value as a text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
