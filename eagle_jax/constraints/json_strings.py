r"""Expressions of the JSON strings whose values match a pattern.

A pattern of JSON Schema is one of ECMAScript and is searched for in the value; what is
generated is JSON text, where a quote is `\"`. Where ECMAScript and Python read a class
differently (an Arabic digit is Python's `\d`), only what both take is written.
"""

import json
import re

from eagle_jax.errors import InputError

# JSON allows U+007F to U+009F, but nobody sees them.
_PLAIN = r'[^"\\\x00-\x1F\x7F-\x9F]'
CHARACTER = rf'(?:{_PLAIN}|\\["\\/bfnrt])'
"""The expression of one character of a JSON string."""

_ESCAPE = r"\\(?:x[\da-fA-F]{2}|u(?![dD][89a-fA-F])[\da-fA-F]{4}|[^xu])"
_MEMBER = re.compile(rf"(?as)({_ESCAPE}|[^\\])(?:-({_ESCAPE}|[^\\]))?")
_TOKEN = re.compile(
    r"(?as)(?P<open>\((?:\?:|\?<\w+>)?(?!\?))|(?P<mark>[|^$])|"
    rf"(?P<one>\)|\[(?!\^?\])\^?(?:\\.|[^\]\\])+\]|{_ESCAPE}|[^\\()|^$*+?{{\[])"
    r"(?P<count>[*+?]|\{\d+(?:,\d*)?\})?\??|(?P<other>.)"
)
# What surely is of a class, and what may be.
_SETS = {
    "d": ("0-9", r"\d"),
    "w": ("0-9A-Z_a-z", r"\w\p{N}"),
    "s": (" ", r"\s\x{FEFF}"),
}
_LETTERS = [*_SETS, *map(str.upper, _SETS)]

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-"
    rf"(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?"
_TIME += r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}"
_PART = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "uri": rf"https?://{_HOST}(?::\d{{1,4}})?(?:/{_PART})?(?:#{_PART})?",
}
"""The patterns of formats: RFC 3339's days that there are, and times with an offset."""


def string_expression(pattern: str) -> str:
    """Returns the expression of JSON strings, with their quotes.

    Args:
        pattern: A pattern of ECMAScript, which is searched for, without look-around,
            back references and properties of Unicode, and with `^` and `$` at the ends
            of the whole or of its alternatives.

    Raises:
        InputError: If the pattern is not supported; it says what is wrong, not where.
    """
    ways: list[list[str]] = [[]]
    depth = 0
    for token in _TOKEN.finditer(pattern):
        one = token["one"]
        depth += bool(token["open"]) - (one == ")")
        if token["other"]:
            shown = pattern[token.start() :][:12]
            raise InputError(f"{shown!r} is not supported here")
        if depth < 0:
            raise InputError("a ')' has no '('")
        if token["mark"] == "|" and not depth:
            ways.append([])
        elif one:
            ways[-1].append((one if one == ")" else _one(one)) + (token["count"] or ""))
        else:
            ways[-1].append(token["mark"] or "(?:")
    if depth:
        raise InputError("a '(' has no ')'")
    return f'"(?:{"|".join(map(_searched, ways))})"'


def _searched(tokens: list[str]) -> str:
    """Returns one alternative's expression, with what may stand around it."""
    is_start, is_end = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    body = tokens[is_start : len(tokens) - is_end]
    if {"^", "$"} & {*body}:
        raise InputError("'^' and '$' are supported at an alternative's ends alone")
    anything = f"{CHARACTER}*"
    before, after = "" if is_start else anything, "" if is_end else anything
    return before + "".join(body) + after


def _one(token: str) -> str:
    """Returns the expression of a character: itself, an escape, `.` or a class."""
    if token == ".":
        return rf"[[^\n\r\x{{2028}}\x{{2029}}]&&{_PLAIN}]"
    if token[0] != "[" and token[1:] not in _LETTERS:
        return f"(?:{_written(_character(token))})"
    is_negated, members, escaped = token.startswith("[^"), "", []
    inside = token[1 + is_negated : -1] if token[0] == "[" else token
    for member in _MEMBER.finditer(inside):
        first, last = member.groups()
        if first[1:] in _LETTERS and not last:
            surely, maybe = _SETS[first[1].lower()][:: -1 if is_negated else 1]
            members += surely if first[1].islower() else f"[^{maybe}]"
            continue
        ends = [_character(end) for end in (first, last) if end]
        written = _written(ends[0])
        if ends != sorted(ends):
            raise InputError(f"{member[0]!r} has its ends in the wrong order")
        if is_negated or last or written == re.escape(ends[0]):
            members += "-".join(map(re.escape, ends))
        else:
            escaped.append(written)
    ways = [f"[[{'^' * is_negated}{members}]&&{_PLAIN}]"] if members else []
    return f"(?:{'|'.join(ways + escaped)})"


def _character(token: str) -> str:
    """Returns the character that a pattern names by itself or by an escape."""
    letter = token[1:2]
    if letter and letter in "xu":
        return chr(int(token[2:], 16))
    if letter and letter in "0tnvfr":
        return dict(zip("0tnvfr", "\0\t\n\v\f\r", strict=True))[letter]
    if letter.isascii() and letter.isalnum():
        raise InputError(f"{token!r} is not supported")
    return token[-1]


def _written(character: str) -> str:
    """Returns the expression of how JSON writes a character."""
    return re.escape(json.dumps(character, ensure_ascii=False)[1:-1])
