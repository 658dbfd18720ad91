"""From a JSON schema to a regular expression: every match follows the schema.

What a value follows becomes *cases*: conjunctions of schemas whose `$ref`, `allOf`,
`anyOf` and `oneOf` are opened. Each case is written type by type. Not every text that
follows a schema matches: objects have the properties that it lists, in its order, and
no others.
"""

import itertools
import json
import math
import re
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

from eagle_jax.constraints.json_strings import CHARACTER, FORMATS, string_expression
from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.parsing import MAX_DIGITS, parse_json

MAX_LENGTH = 2**20
"""The largest length of an expression, those of its parts included."""

MAX_LEVELS = 3
"""How often a `$ref` is opened inside itself, and how deep values of any kind go."""

_COMMA, _COLON = "[ ]?,[ ]?", "[ ]?:[ ]?"
_STRING = f'"{CHARACTER}*"'
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_SCALARS = {
    "null": "null",
    "boolean": "true|false",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?",
}
_TYPES = {name: {name} for name in (*_SCALARS, "string", "array", "object")}
_TYPES["number"].add("integer")
_TYPE_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number"}
_TYPE_OF |= {str: "string", list: "array", dict: "object"}

_ANNOTATIONS = {"title", "description", "default", "example", "examples", "$comment"}
_ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly", "$schema", "$id", "$defs"}
_ANNOTATIONS |= {"definitions", "discriminator", "contentEncoding", "contentMediaType"}
# The type of a keyword's own value, by the type of value that it restricts.
_KEYWORDS: dict[str, dict[str, type]] = {
    "any": {"type": object, "const": object, "enum": list, "$ref": str}
    | {"allOf": list, "anyOf": list, "oneOf": list},
    "string": {"pattern": str, "format": str, "minLength": int, "maxLength": int},
    "array": {"items": object, "prefixItems": list, "minItems": int, "maxItems": int},
    "object": {"properties": dict, "additionalProperties": object, "required": list},
}
_KINDS = {name: kind for kinds in _KEYWORDS.values() for name, kind in kinds.items()}


class _Part(NamedTuple):
    schema: Any
    where: str  # The JSON pointer.
    refs: tuple[str, ...] = ()  # Opened on the way; "" is inside a value of any kind.

    def inner(self, *keys: str | int) -> "_Part":
        schema, where = self.schema, self.where
        for key in keys:
            schema = schema[key]
            where += "/" + str(key).replace("~", "~0").replace("/", "~1")
        return _Part(schema, where, self.refs)

    def all(self, name: str) -> list["_Part"]:
        places = range(len(self.schema.get(name, ())))
        return [self.inner(name, place) for place in places]

    def refusal(self, name: str, why: str) -> InputError:
        return InputError(f"`json_schema`: {name} at {self.where} {why}")


_Case = list[_Part]


def schema_expression(schema: Any) -> str:
    """Returns an expression for outlines-core whose matches follow a schema as JSON.

    Args:
        schema: The JSON schema, as text or as the value that it describes.

    Raises:
        InputError: If the text is no JSON, a keyword would have to be ignored and is no
            annotation, or nothing can follow the schema.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    parse_json(text, "`json_schema`")
    root = json.loads(text, parse_float=_number)
    try:
        found = _Writer(root).expression([_Part(root, "#")])
    except RecursionError as error:
        raise InputError("`json_schema` is nested too deep; make it flatter") from error
    if found is None:
        raise InputError(
            "no JSON follows the `json_schema`: its parts contradict each other, or it "
            "needs itself without an end"
        )
    return found


def _number(digits: str) -> float:
    value = float(digits)  # To JSON Schema 1.0 is an integer, and equal to 1.
    return int(value) if value.is_integer() and abs(value) < 10**MAX_DIGITS else value


class _Writer:
    def __init__(self, root: Any):
        self.root, self.left = root, MAX_LENGTH

    def expression(self, parts: _Case) -> str | None:
        """Returns the expression of values that follow all the schemas, if any can."""
        parts = [part for part in parts if part.schema is not True] or parts[:1]
        if any(p.refs.count(ref) > MAX_LEVELS for p in parts for ref in p.refs):
            return None
        found = dict.fromkeys(map(self._case, self._cases(parts)))
        texts = [text for text in found if text]
        self._spend(sum(map(len, texts)))
        return f"(?:{'|'.join(texts)})" if texts else None

    def _spend(self, length: int) -> None:
        self.left -= length
        if self.left < 0:
            raise InputError(
                f"`json_schema` makes an expression of over {MAX_LENGTH:,} characters; "
                "give one with fewer parts, alternatives or references"
            )

    def _both(self, ours: list[_Case], theirs: list[_Case]) -> list[_Case]:
        self._spend(16 * len(ours) * len(theirs))  # So time is bounded, too.
        return [[*one, *other] for one in ours for other in theirs]

    def _cases(self, parts: _Case, opened: tuple[str, ...] = ()) -> list[_Case]:
        found: list[_Case] = [[]]
        for part in parts:
            part = part._replace(schema=_checked(part))
            found = self._both(found, [[part]])
            found = self._both(found, self._cases(part.all("allOf"), opened))
            if "$ref" in part.schema:
                ref = part.schema["$ref"]
                if ref in opened:
                    raise part.refusal("$ref", "leads to itself")
                target = _Part(self._target(part), ref, (*part.refs, ref))
                found = self._both(found, self._cases([target], (*opened, ref)))
            for name in (name for name in ("anyOf", "oneOf") if name in part.schema):
                cases = [self._cases([way], opened) for way in part.all(name)]
                ways = [self._both(found, way) for way in cases]
                for ours, theirs in itertools.combinations(ways, 2):
                    both = self._both(ours, theirs) if name == "oneOf" else []
                    if not all(map(self._is_empty, both)):
                        raise part.refusal(
                            "oneOf",
                            "has alternatives that one value may follow; use anyOf, or "
                            "objects with a required property with another `const`",
                        )
                found = list(itertools.chain(*ways))
        return found

    def _target(self, part: _Part) -> Any:
        ref, value = part.schema["$ref"], self.root
        if ref != "#" and not ref.startswith("#/"):
            raise part.refusal("$ref", "must begin with '#/', a place in the schema")
        for key in urllib.parse.unquote(ref).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key) if isinstance(value, list) else key]
            except (LookupError, TypeError, ValueError):
                raise part.refusal("$ref", f"leads nowhere: {ref!r}") from None
        return value

    def _is_empty(self, case: _Case) -> bool:
        """Whether surely no value follows: by type, value or a required property."""
        types, _ = _meaning(case)
        required = itertools.chain(*_all(case, "required"))
        return not types or (
            types == {"object"}
            and any(
                not any(_meaning(one)[0] for one in self._cases(_inside(case, name)))
                for name in required
            )
        )

    def _case(self, case: _Case) -> str | None:
        types, values = _meaning(case)
        if values is not None:
            for name in itertools.chain(*(_KEYWORDS.get(one, ()) for one in types)):
                if _all(case, name):
                    raise _refusal(case, [name], "must not stand beside enum")
            return "|".join(map(_literal, values.values())) or None
        if not _all(case, "type"):  # The other keywords say what is meant.
            types = {
                name
                for name in types
                if any(_all(case, one) for one in _KEYWORDS.get(name, ()))
            } or types
        if "number" in types:
            types.remove("integer")
        found = [text for name, text in _SCALARS.items() if name in types]
        writers = {"string": _string, "array": self._array, "object": self._object}
        written = (write(case) for name, write in writers.items() if name in types)
        return "|".join([*found, *filter(None, written)]) or None

    def _array(self, case: _Case) -> str | None:
        low, high = _limits(case, "Items")
        firsts = max([1, *map(len, _all(case, "prefixItems"))])
        items = [
            self.expression(_inside(case, place)) if place < high else None
            for place in range(firsts + 1)
        ]
        more = items.pop()
        if more is None or (_all(case, "prefixItems") and not _all(case, "items")):
            more, high = "", min(high, firsts)
        else:
            more = f"(?:{_COMMA}{more})" + _times(max(low - firsts, 0), high - firsts)
        if low > high:
            return None
        for place, item in reversed([*enumerate(items)]):
            if item is None and low > place:
                return None
            more = f"{_COMMA if place else ''}{item}{more}" if item else ""
            if low <= place:
                more = f"(?:{more})?"
        return rf"\[[ ]?{more}[ ]?\]"

    def _object(self, case: _Case) -> str | None:
        required = {*itertools.chain(*_all(case, "required"))}
        given = [*_all(case, "properties"), required]
        fields = []
        for name in dict.fromkeys(itertools.chain(*given)):
            text = self.expression(_inside(case, name))
            if text is None and name in required:
                return None
            if text is not None:
                fields.append((f"{_literal(name)}{_COLON}{text}", name in required))
        some = _some(fields) if fields else ""
        is_free = not required and not _all(case, "properties")
        if is_free and (text := self.expression(_inside(case, ""))):
            some = f"{_STRING}{_COLON}{text}(?:{_COMMA}{_STRING}{_COLON}{text})*"
        return rf"\{{[ ]?(?:{some}){'' if required else '?'}[ ]?\}}"


def _some(fields: list[tuple[str, bool]]) -> str:
    """Returns the expression of fields in order: at least one, and all that must be."""
    if len(fields) == 1:
        return fields[0][0]
    half = len(fields) // 2  # Or the expression's length would be quadratic.
    text = _some(fields[:half])
    for field, is_needed in fields[half:]:
        text += f"(?:{_COMMA}{field}){'' if is_needed else '?'}"
    if any(is_needed for _, is_needed in fields[:half]):
        return text
    return f"(?:{text}|{_some(fields[half:])})"


def _checked(part: _Part) -> dict[str, Any]:
    """Returns the schema as an object; refuses what would have to be ignored."""
    if isinstance(part.schema, bool):
        return {} if part.schema else {"enum": []}
    if not isinstance(part.schema, dict):
        raise part.refusal(f"{part.schema!r}", "is no schema; give an object")
    for name, value in part.schema.items():
        is_inner = name == "$id" and part.where != "#"  # It changes what `$ref` means.
        if (name in _ANNOTATIONS and not is_inner) or name.startswith("x-"):
            continue
        if name not in _KINDS:
            raise part.refusal(
                name, f"is not supported; leave it out{did_you_mean(name, _KINDS)}"
            )
        is_known = _KINDS[name] in (object, type(value))
        if name == "type":
            is_known &= all(one in list(_TYPES) for one in _listed(value))
        elif name == "required":
            is_known &= all(isinstance(one, str) for one in _listed(value))
        elif name == "format" and is_known:
            is_known = value in FORMATS
        if not is_known:
            raise part.refusal(name, f"cannot be {value!r}")
    return part.schema


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _all(case: _Case, name: str) -> list[Any]:
    return [part.schema[name] for part in case if name in part.schema]


def _refusal(case: _Case, names: Iterable[str], why: str) -> InputError:
    places = [(part, name) for name in names for part in case if name in part.schema]
    part, name = places[0]
    return part.refusal(name, why)


def _limits(case: _Case, of: str) -> tuple[int, float]:
    return max([0, *_all(case, "min" + of)]), min([math.inf, *_all(case, "max" + of)])


def _times(low: int, high: float) -> str:
    return f"{{{low},{'' if high == math.inf else high}}}"


def _meaning(case: _Case) -> tuple[set[str], dict[str, Any] | None]:
    """Returns the types of a case, and its values by their JSON if it lists them."""
    types = {*_TYPES}
    for given in _all(case, "type"):
        types &= set().union(*(_TYPES[one] for one in _listed(given)))
    lists = [*_all(case, "enum"), *([value] for value in _all(case, "const"))]
    if not lists:
        return types, None
    tables = [{json.dumps(one, sort_keys=True): one for one in ones} for ones in lists]
    values = {
        key: value
        for key, value in tables[0].items()
        if _type_of(value) in types and all(key in table for table in tables)
    }
    return {*map(_type_of, values.values())}, values


def _type_of(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else _TYPE_OF[type(value)]


def _inside(case: _Case, key: str | int) -> _Case:
    """Returns the schemas of an item, by its place, or of a property."""
    listed, others = "properties", "additionalProperties"
    if isinstance(key, int):
        listed, others = "prefixItems", "items"
    found = []
    for part in case:
        inner = part.schema.get(listed, {})
        if key in (range(len(inner)) if isinstance(key, int) else inner):
            found.append(part.inner(listed, key))
        elif others in part.schema:
            found.append(part.inner(others))
    return found or [_Part(True, case[0].where, (*case[0].refs, ""))]


def _string(case: _Case) -> str | None:
    patterns = {*_all(case, "pattern")}
    patterns |= {f"^(?:{FORMATS[name]})$" for name in _all(case, "format")}
    low, high = _limits(case, "Length")
    if not patterns:
        return f'"{CHARACTER}{_times(low, high)}"' if low <= high else None
    lengths = [*_all(case, "minLength"), *_all(case, "maxLength")]
    if len(patterns) > 1 or lengths:
        why = "must not stand beside another one or a length"
        raise _refusal(case, ["pattern", "format"], why)
    try:
        return string_expression(patterns.pop())
    except InputError as error:
        raise _refusal(case, ["pattern"], f"cannot be followed: {error}") from error


def _literal(value: Any) -> str:
    """Returns the expression of one value, with spaces where they may be."""
    if isinstance(value, dict):
        pairs = (f"{_literal(name)}{_COLON}{_literal(value[name])}" for name in value)
        return rf"\{{[ ]?{_COMMA.join(pairs)}[ ]?\}}"
    if isinstance(value, list):
        return rf"\[[ ]?{_COMMA.join(map(_literal, value))}[ ]?\]"
    return re.escape(json.dumps(value, ensure_ascii=False))
