"""Files changed at random, as a bad disk, a bad program or a bad person would."""

import json
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

OUTSIDE = "../outside/secret.safetensors"
"""A file beside the folder that is changed: nothing may open it."""

_TEXTS = [
    *("", "a", "x" * 5000, "\x1b[2J\u202eoops\nsecond line", "\ud800", "a\0b"),
    *(OUTSIDE, "/etc/passwd", "..", "{{ 1/0 }}", "{% for %}", "nan", "1e999"),
    "{{ raise_exception('no\nway') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
]
_NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 1000, 65_536, 2**24, 2**31 - 1, 2**31, 2**53, 2**63, 10**40),
    *(0.5, -0.5, 1e-320, 1e30, 1.5e308),
]
_ODD = [None, True, False, [], {}, [[]], [None], {"": None}, [1, "a"], {"a": {"b": 1}}]
# What `json` writes, and others must not read.
_TOKENS = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 100_000]


def hostile_value(rng: random.Random) -> Any:
    """A value of any kind."""
    # A copy: a list that is changed later could come to hold itself.
    return deepcopy(rng.choice([*_TEXTS, *_NUMBERS, *_ODD]))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside a value, as its holder and key."""
    found: list[tuple[Any, Any]] = []
    holders = [value]  # No recursion: values may be nested as deep as there is room.
    while holders:
        holder = holders.pop()
        keys = holder.keys() if isinstance(holder, dict) else range(len(holder))
        for key in list(keys):
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                holders.append(holder[key])
    return found


def change_value(rng: random.Random, value: Any) -> str:
    """Changes one to three places of a JSON value; returns its text."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        places = _places(value)
        if not places:
            break
        holder, key = rng.choice(places)
        action = rng.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[rng.choice(_TEXTS)] = holder.pop(key)
        elif action == 2 and isinstance(holder[key], int) and rng.random() < 0.5:
            holder[key] = holder[key] * rng.choice([2, -1, 1000])
        else:
            holder[key] = hostile_value(rng)
    text = json.dumps(value)
    if rng.random() < 0.1:
        first, colon, rest = text.partition(": ")
        text = f"{first}{colon}{rng.choice(_TOKENS)}, {rest}" if colon else text
    return text


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Cuts, doubles, flips or overwrites a part."""
    if not content:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(100)))
    # Headers are where most is to be broken.
    reach = rng.choice([16, 400, len(content)])
    place = rng.randrange(min(reach, len(content)))
    action = rng.randrange(5)
    if action == 0:
        return content[:place]
    if action == 1:
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        return bytes(changed)
    size = rng.choice([1, 2, 8, 100])
    filler = {2: b"\xff", 3: b"\0", 4: rng.choice([b"9", b"[", b'"', b"\n"])}[action]
    insert = rng.random() < 0.5
    return content[:place] + filler * size + content[place + size * (not insert) :]


def change_json(rng: random.Random, path: Path) -> None:
    """Changes values of a JSON file or, more rarely, its bytes."""
    if rng.random() < 0.2:
        path.write_bytes(change_bytes(rng, path.read_bytes()))
        return
    text = change_value(rng, json.loads(path.read_text(encoding="utf-8")))
    path.write_bytes(text.encode(errors="surrogatepass"))


def change_lines(rng: random.Random, path: Path) -> None:
    """Changes one line of a file of JSON lines."""
    lines = path.read_bytes().splitlines()
    place = rng.randrange(len(lines))
    if rng.random() < 0.8:
        text = change_value(rng, json.loads(lines[place]))
        lines[place] = text.encode(errors="surrogatepass")
    else:
        lines[place] = change_bytes(rng, lines[place])
    path.write_bytes(b"\n".join(lines) + b"\n" * (rng.random() < 0.9))


def change_toml(rng: random.Random, path: Path) -> None:
    """Gives one key another value, or changes bytes."""
    if rng.random() < 0.2:
        path.write_bytes(change_bytes(rng, path.read_bytes()))
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = [n for n, line in enumerate(lines) if "=" in line and line[0] != "#"]
    place = rng.choice(keys)
    value = rng.choice(
        [
            *("nan", "-inf", "1e400", "9" * 400, "[" * 5000, "{" * 300, "1979-05-27"),
            *(json.dumps(hostile_value(rng)) for _ in range(8)),
        ]
    )
    name = lines[place].partition("=")[0]
    lines[place] = f"{name}= {value}"
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))


def change_safetensors(rng: random.Random, path: Path) -> None:
    """Changes the header's values, or any bytes."""
    content = path.read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(change_bytes(rng, content))
        return
    size = int.from_bytes(content[:8], "little")
    header = change_value(rng, json.loads(content[8 : 8 + size]))
    data = header.encode(errors="surrogatepass")
    path.write_bytes(len(data).to_bytes(8, "little") + data + content[8 + size :])


def change_any(rng: random.Random, path: Path) -> None:
    """Changes the bytes of any file."""
    path.write_bytes(change_bytes(rng, path.read_bytes()))


def replace_file(rng: random.Random, path: Path) -> None:
    """Puts nothing, a folder or a link in place of a file."""
    path.unlink()
    action = rng.randrange(3)
    if action == 0:
        path.mkdir()
    elif action == 1:
        path.symlink_to(path.parent / "missing")


CHANGES: dict[str, Callable[[random.Random, Path], None]] = {
    ".json": change_json,
    ".jsonl": change_lines,
    ".toml": change_toml,
    ".safetensors": change_safetensors,
}


def change_file(rng: random.Random, path: Path) -> None:
    """Changes a file in the way that its kind invites."""
    if rng.random() < 0.05:
        replace_file(rng, path)
    else:
        CHANGES.get(path.suffix, change_any)(rng, path)


def changed_copy(seed: int, source: Path, home: Path, wanted: list[str]) -> Path:
    """Copies a folder and changes one file of it.

    Args:
        seed: Of all that is drawn.
        source: Left as it is.
        home: Gets `case/`, the copy, and `outside/`, which nothing may open.
        wanted: Patterns of the files to choose from, one of which is drawn first.

    Returns:
        The copy.
    """
    rng = random.Random(seed)
    copy = home / "case"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy, symlinks=True)
    paths: list[Path] = []
    while not paths:
        pattern = rng.choice(wanted)
        paths = [path for path in sorted(copy.glob(pattern)) if path.is_file()]
    change_file(rng, rng.choice(paths))
    return copy
