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

_TEXTS = ["", "a", "x" * 5000, "\x1b[2J\u202eoops\nsecond line", "\ud800", "a\0b"]
_TEXTS += [OUTSIDE, "/etc/passwd", "..", "{{ 1/0 }}", "{% for %}", "nan", "1e999"]
_TEXTS += ["{{ raise_exception('no\nway') }}"]
_TEXTS += ["{{ ''.__class__.__mro__[1].__subclasses__() }}"]
_ODD: list[Any] = [None, True, False, [], {}, [[]], [None], {"": None}, {"a": {"b": 1}}]
_ODD += [0, 1, -1, 2, 3, 7, 1000, 65_536, 2**24, 2**31 - 1, 2**31, 2**53, 2**63, 10**40]
_ODD += [0.5, -0.5, 1e-320, 1e30, 1.5e308]
# What `json` writes, and others must not read.
_TOKENS = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 100_000]
_TOML = ["nan", "-inf", "1e400", "9" * 400, "[" * 5000, "{" * 300, "1979-05-27"]


def _hostile_value(rng: random.Random) -> Any:
    # A copy: a list that is changed later could come to hold itself.
    return deepcopy(rng.choice(_TEXTS + _ODD))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside a value, as its holder and key."""
    found: list[tuple[Any, Any]] = []
    holders = [value]  # No recursion: values may be nested as deep as there is room.
    while holders:
        holder = holders.pop()
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                holders.append(holder[key])
    return found


def _change_json(rng: random.Random, content: bytes) -> bytes:
    """Changes one to three places of a JSON value."""
    value = json.loads(content)
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
            holder[key] = _hostile_value(rng)
    text = json.dumps(value)
    if rng.random() < 0.1:
        first, colon, rest = text.partition(": ")
        text = f"{first}{colon}{rng.choice(_TOKENS)}, {rest}" if colon else text
    return text.encode(errors="surrogatepass")


def _change_lines(rng: random.Random, content: bytes) -> bytes:
    """Changes one line of JSON lines."""
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = _change_json(rng, lines[place])
    return b"\n".join(lines) + b"\n" * (rng.random() < 0.9)


def _change_toml(rng: random.Random, content: bytes) -> bytes:
    """Gives one key another value."""
    lines = content.decode().splitlines()
    keys = [n for n, line in enumerate(lines) if "=" in line and line[0] != "#"]
    place = rng.choice(keys)
    name = lines[place].partition("=")[0]
    value = rng.choice([*_TOML, *(json.dumps(_hostile_value(rng)) for _ in range(8))])
    lines[place] = f"{name}= {value}"
    return "\n".join(lines).encode(errors="surrogatepass")


def _change_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Changes the header's values."""
    size = int.from_bytes(content[:8], "little")
    header = _change_json(rng, content[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Cuts, flips or overwrites a part, or puts something between."""
    # Headers are where most is to be broken.
    reach = rng.choice([16, 400, len(content)])
    place = rng.randrange(max(1, min(reach, len(content))))
    filler = rng.choice([b"", b"\xff", b"\0", b"9", b"[", b'"', b"\n", None])
    if filler is None:
        changed = bytearray(content or b"a")
        changed[place] ^= 1 << rng.randrange(8)
        return bytes(changed)
    size = rng.choice([1, 2, 8, 100])
    after = place + size * rng.randrange(2) if filler else len(content)
    return content[:place] + filler * size + content[after:]


_CHANGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": _change_json,
    ".jsonl": _change_lines,
    ".toml": _change_toml,
    ".safetensors": _change_safetensors,
}


def changed_copy(seed: int, source: Path, home: Path, wanted: list[str]) -> Path:
    """Returns a copy of a folder in which one file of a wanted pattern is changed."""
    rng = random.Random(seed)
    copy = home / "case"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy, symlinks=True)
    paths: list[Path] = []
    while not paths:
        pattern = rng.choice(wanted)
        paths = [path for path in sorted(copy.glob(pattern)) if path.is_file()]
    path = rng.choice(paths)
    content, fate = path.read_bytes(), rng.random()
    if fate < 0.75:
        change = _CHANGES.get(path.suffix, _change_bytes)
        path.write_bytes(change(rng, content))
    elif fate < 0.95:
        path.write_bytes(_change_bytes(rng, content))
    else:
        path.unlink()
        if fate < 0.97:
            path.mkdir()
        elif fate < 0.985:
            path.symlink_to(path.parent / "missing")
    return copy
