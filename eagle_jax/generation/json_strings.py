r"""Expressions of the JSON strings whose values match a pattern.

A pattern of JSON Schema is one of ECMAScript and is searched for in the value; what is
generated is JSON text, where a quote is `\"`. Where ECMAScript and Python read a class
differently (an Arabic digit is Python's `\d`), only what both take is written.
"""

import json
import math
import re

from eagle_jax.errors import InputError

_Ranges = list[tuple[int, int]]  # Of code points, each with both ends.
_Item = tuple[str, str | None]  # An expression and its repetition, `None` of groups.

_LAST = 0x10FFFF
# Surrogates are no characters; of control characters only \b\f\n\r\t are written.
_UNSAFE = [(0, 31), (34, 34), (92, 92), (127, 159), (0xD800, 0xDFFF)]
_ESCAPED = dict(zip('"\\/\b\f\n\r\t', '"\\/bfnrt', strict=True))
_DIGITS = [(48, 57)]
_WORDS = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACES = [(9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A)]
_SPACES += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
# What Unicode counts as digits, with what lies between them.
_MORE_DIGITS = [(0x660, 0x1C59), (0xA620, 0xABF9), (0xFF10, 0xFF19)]
_MORE_DIGITS += [(0x104A0, 0x16FFF), (0x1CCF0, 0x1FBF9)]

_ESCAPE = (
    r"\\(?:x[\da-fA-F]{2}|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    r"|u[\da-fA-F]{4}|[^xu])"
)
_MEMBER = re.compile(rf"(?as)({_ESCAPE}|[^\\])(?:-({_ESCAPE}|[^\\]))?")
_TOKEN = re.compile(
    r"(?as)(\((?:\?:|\?<\w+>)?(?!\?)|[|^$])|"
    rf"(\)|\[(?!\^?\])\^?(?:\\.|[^\]\\])+\]|{_ESCAPE}|[^\\()|^$*+?{{\[])"
    r"([*+?]|\{\d+(?:,\d*)?\})?\??"
)

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


def string_expression(pattern: str, low: int, high: float) -> str | None:
    """Returns the expression of JSON strings, with their quotes.

    Args:
        pattern: A pattern of ECMAScript, which is searched for, without look-around,
            back references and properties of Unicode, and with `^` and `$` at the ends
            of the whole or of its alternatives.
        low: The least number of characters.
        high: The largest number of characters.

    Returns:
        The expression, `None` if there is no such string.

    Raises:
        InputError: If the pattern is not supported, or `low` and `high` cannot be
            followed beside it; it says what is wrong, not where.
    """
    alternatives: list[list[_Item]] = [[]]
    place, depth, group = 0, 0, ""
    while place < len(pattern):
        token = _TOKEN.match(pattern, place)
        if token is None or (depth and token[1] in ("^", "$")):
            raise InputError(f"{pattern[place:][:12]!r} is not supported here")
        place, mark, one, count = token.end(), token[1] or "", token[2], token[3] or ""
        depth += mark.startswith("(") - (one == ")")
        if depth < 0:
            raise InputError("a ')' has no '('")
        text = one if one in (None, ")") else _one(one)
        text = text or ("(?:" if mark.startswith("(") else mark)
        if depth or one == ")":
            group += text + count
        elif mark == "|":
            alternatives.append([])
        else:
            alternatives[-1].append((text, count))
        if not depth and group:
            alternatives[-1].append((group, None))
            group = ""
    if depth:
        raise InputError("a '(' has no ')'")
    texts = [_bounded(items, low, high) for items in alternatives]
    texts = [text for text in texts if text is not None]
    return f'"(?:{"|".join(texts)})"' if texts else None


def _bounded(items: list[_Item], low: int, high: float) -> str | None:
    """Returns one alternative's expression, with what may stand around it."""
    shape = "".join(text if text in ("^", "$") else "x" for text, _ in items)
    if not re.fullmatch(r"\^*x*\$*", shape):
        raise InputError("'^' and '$' are supported at an alternative's ends alone")
    anything: _Item = (_written([(0, _LAST)]), "*")
    body = [item for item in items if item[0] not in ("^", "$")]
    if not shape.startswith("^"):
        body.insert(0, anything)
    if not shape.endswith("$") and body != [anything]:
        body.append(anything)
    if (low, high) != (0, math.inf):
        if any(count is None for _, count in body):
            raise InputError("it has groups, so no length can be followed beside it")
        times = [_times(count or "") for _, count in body]
        least, most = (sum(ends) for ends in zip((0, 0), *times, strict=True))
        if least > high or most < low or low > high:
            return None
        if least < low or most > high:
            (place, *others) = [n for n, ends in enumerate(times) if len({*ends}) > 1]
            if others:
                raise InputError("no length can be followed beside its repetitions")
            rest = least - times[place][0]
            low, high = max(times[place][0], low - rest), min(most, high) - rest
            body[place] = (body[place][0], between(low, high))
    return "".join(text + (count or "") for text, count in body)


def between(low: int, high: float) -> str:
    """Returns how an expression says that something comes so many times."""
    return f"{{{low},{'' if high == math.inf else high}}}"


def _times(count: str) -> tuple[int, float]:
    """Returns how often a repetition repeats, at least and at most."""
    known = {"": (1, 1), "*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}
    if count in known:
        return known[count]
    low, comma, high = count[1:-1].partition(",")
    return int(low), int(high or low) if high or not comma else math.inf


def _one(token: str) -> str:
    """Returns the expression of a character: itself, an escape, `.` or a class."""
    if token == ".":
        return _written(_without([(10, 10), (13, 13), (0x2028, 0x2029)]))
    if not token.startswith("["):
        return _written(_ranges(token))
    is_negated = token.startswith("[^")
    found: _Ranges = []
    for member in _MEMBER.finditer(token, 1 + is_negated, len(token) - 1):
        ends = [_ranges(part, is_negated) for part in member.groups() if part]
        (first, _), *more = [*ends[0], *ends[-1]]
        if len(ends) == 2 and len(more) == 1:
            if more[0][0] < first:
                raise InputError(f"{member[0]!r} has its ends in the wrong order")
            found.append((first, more[0][1]))
        else:
            found += sum(ends, [(45, 45)] * (len(ends) - 1))
    return _written(_without(found) if is_negated else found)


def _ranges(one: str, is_negated: bool = False) -> _Ranges:
    """Returns what a character or an escape is; all that it may be, if negated."""
    letter = one[1:2]
    if letter and letter in "dwsDWS":
        surely, others = {
            "d": (_DIGITS, _DIGITS + _MORE_DIGITS),
            "w": (_WORDS, [*_WORDS, (128, _LAST)]),
            "s": (_SPACES, [*_SPACES, (28, 31), (133, 133), (0xFEFF, 0xFEFF)]),
        }[letter.lower()]
        if letter.islower():
            return others if is_negated else surely
        return _without(surely if is_negated else others)
    if letter and letter in "xu":
        one = json.loads(f'"{one.replace("x", "u00")}"')
    elif letter and letter in "0tnvfr":
        one = dict(zip("0tnvfr", "\0\t\n\v\f\r", strict=True))[letter]
    elif letter.isascii() and letter.isalnum():
        raise InputError(f"{one!r} is not supported")
    return [(ord(one[-1]), ord(one[-1]))]


def _without(ranges: _Ranges) -> _Ranges:
    """Returns the code points that are in none of the ranges."""
    found, place = [], 0
    for low, high in sorted(ranges):
        if low > place:
            found.append((place, low - 1))
        place = max(place, high + 1)
    return [*found, (place, _LAST)] if place <= _LAST else found


def _written(ranges: _Ranges) -> str:
    """Returns the expression of how JSON writes one of the characters."""
    plain = _without(_without(ranges) + _UNSAFE)
    spans = [rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in plain]
    escaped = [
        re.escape(written)
        for one, written in _ESCAPED.items()
        if any(low <= ord(one) <= high for low, high in ranges)
    ]
    ways = [f"[{''.join(spans)}]"] if spans else []
    ways += [rf"\\[{''.join(escaped)}]"] if escaped else []
    if not ways:
        raise InputError("it asks for a character that no text has")
    return f"(?:{'|'.join(ways)})"
