"""From a JSON schema to a regular expression: every match follows the schema.

A schema becomes *cases*, conjunctions of schemas without `$ref`, `allOf`, `anyOf` and
`oneOf`, and each case is written type by type. Not every text that follows a schema
matches: objects have the properties that it lists, in its order, and no others.
"""

import itertools
import json
import math
import re
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.generation.json_strings import FORMATS, between, string_expression
from eagle_jax.parsing import MAX_DIGITS, parse_json

MAX_LENGTH = 2**20
"""The largest length of an expression, those of its parts included."""

MAX_LEVELS = 3
"""How often a `$ref` is opened inside itself, and how deep values of any kind go."""

_COMMA, _COLON = "[ ]?,[ ]?", "[ ]?:[ ]?"
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_SCALARS = {
    "null": "null",
    "boolean": "true|false",
    "integer": _INTEGER,
    "fraction": rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?",
}
_TYPES = {name: {name} for name in ("null", "boolean", "integer", "string")}
_TYPES |= {"number": {"integer", "fraction"}, "array": {"array"}, "object": {"object"}}

_ANNOTATIONS = {"title", "description", "default", "example", "examples", "$comment"}
_ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly", "$schema", "$id", "$defs"}
_ANNOTATIONS |= {"definitions", "discriminator", "contentEncoding", "contentMediaType"}
# What a keyword's own value is, by the type of value that it restricts.
_KEYWORDS: dict[str, dict[str, tuple[type, ...]]] = {
    "any": {"type": (str, list), "const": (), "enum": (list,), "$ref": (str,)}
    | {"allOf": (list,), "anyOf": (list,), "oneOf": (list,)},
    "string": {"pattern": (str,), "format": (str,)}
    | {"minLength": (int,), "maxLength": (int,)},
    "array": {"minItems": (int,), "maxItems": (int,)}
    | {"items": (dict, bool), "prefixItems": (list,)},
    "object": {"properties": (dict,), "additionalProperties": (dict, bool)}
    | {"required": (list,)},
}
_KINDS = {name: kind for kinds in _KEYWORDS.values() for name, kind in kinds.items()}

_STRING = string_expression("", 0, math.inf)


class _Part(NamedTuple):
    schema: Any
    where: str  # The JSON pointer.
    refs: tuple[str, ...] = ()  # The references that were opened on the way.

    def inner(self, *keys: str | int) -> "_Part":
        schema, where = self.schema, self.where
        for key in keys:
            schema = schema[key]
            where += "/" + str(key).replace("~", "~0").replace("/", "~1")
        return _Part(schema, where, self.refs)

    def refusal(self, name: str, why: str) -> InputError:
        return InputError(f"`json_schema`: {name} at {self.where} {why}")


class _Case(NamedTuple):
    parts: tuple[_Part, ...]
    is_open: bool  # Whether no reference is opened too often inside itself.

    def all(self, name: str) -> list[Any]:
        return [part.schema[name] for part in self.parts if name in part.schema]

    def limits(self, of: str) -> tuple[int, float]:
        return max([0, *self.all("min" + of)]), min([math.inf, *self.all("max" + of)])

    def refusal(self, names: Iterable[str], why: str) -> InputError:
        places = [(n, p) for n in names for p in self.parts if n in p.schema]
        return places[0][1].refusal(places[0][0], why)


def schema_expression(schema: Any) -> str:
    """Returns a regular expression whose matches are JSON that follows a schema.

    Args:
        schema: The JSON schema, as text or as the value that it describes.

    Returns:
        An expression for outlines-core.

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

    def expression(self, parts: list[_Part], levels: int = MAX_LEVELS) -> str | None:
        """Returns the expression of values that follow all the schemas, if any can."""
        parts = [p for p in parts if p.schema is not True and p.schema != {}]
        levels = MAX_LEVELS if parts else levels
        cases = [case for case in self._cases(parts) if case.is_open]
        found = dict.fromkeys(self._case(case, levels) for case in cases)
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

    def _cases(
        self, todo: list[_Part], done: tuple[_Part, ...] = (), is_open: bool = True
    ) -> list[_Case]:
        self._spend(16)  # Time is bounded by the same sum.
        if not todo:
            return [_Case(done, is_open)]
        part, *rest = todo
        part = part._replace(schema=_checked(part))
        for name in (name for name in ("anyOf", "oneOf") if name in part.schema):
            others = {key: part.schema[key] for key in part.schema if key != name}
            ways = [
                self._cases([part._replace(schema=others), way, *rest], done, is_open)
                for way in _inner(part, name)
            ]
            if name == "oneOf":
                for ours, theirs in itertools.permutations(ways, 2):
                    pairs = itertools.product(ours, theirs)
                    if not all(self._excludes(*pair) for pair in pairs):
                        raise part.refusal(
                            "oneOf",
                            "has alternatives that one value may follow; use anyOf, or "
                            "a required property with another `const` in each",
                        )
            return [case for way in ways for case in way]
        if "$ref" in part.schema:
            ref = part.schema["$ref"]
            if (times := part.refs.count(ref)) > MAX_LEVELS:
                raise part.refusal("$ref", "leads to itself")
            is_open &= times < MAX_LEVELS
            rest.insert(0, _Part(self._target(part), ref, (*part.refs, ref)))
        return self._cases([*_inner(part, "allOf"), *rest], (*done, part), is_open)

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

    def _excludes(self, one: _Case, other: _Case, levels: int = MAX_LEVELS) -> bool:
        """Whether surely no text that is written for a case follows the other one."""
        ours, theirs = _values(one), _values(other)
        self._spend(8 + len(ours or ()) + len(theirs or ()))
        if ours is not None and theirs is not None:
            return not ours.keys() & theirs.keys()
        common = _types(one, is_written=ours is None) & _types(other)
        for values in (ours, theirs):
            if values is not None:
                common &= set(map(_type_of, values.values()))
        names = _names(one)
        if common != {"object"} or ours is not None or names is None or not levels:
            return not common
        if not {*itertools.chain(*other.all("required"))} <= {*names}:
            return True
        for name in {*itertools.chain(*one.all("required"))}:
            cases = [self._cases(_property(case, name)) for case in (one, other)]
            pairs = itertools.product(*cases)
            if all(self._excludes(a, b, levels - 1) for a, b in pairs):
                return True
        return False

    def _case(self, case: _Case, levels: int) -> str | None:
        types = _types(case, is_written=True)
        values = _values(case)
        if values is not None:
            for type_ in {*map(_type_of, values.values())} & _KEYWORDS.keys():
                if any(map(case.all, _KEYWORDS[type_])):
                    raise case.refusal(_KEYWORDS[type_], "must not stand beside enum")
            return "|".join(map(_literal, values.values())) or None
        if not case.parts and not levels:
            types -= {"array", "object"}
        if "fraction" in types:
            types.remove("integer")
        found: list[str | None] = [_SCALARS[name] for name in _SCALARS if name in types]
        if "string" in types:
            found.append(_string(case))
        if "array" in types:
            found.append(self._array(case, levels))
        if "object" in types:
            found.append(self._object(case, levels))
        return "|".join(text for text in found if text) or None

    def _array(self, case: _Case, levels: int) -> str | None:
        def item(place: int) -> str | None:
            parts = []
            for part in case.parts:
                if place < len(part.schema.get("prefixItems", ())):
                    parts.append(part.inner("prefixItems", place))
                elif "items" in part.schema:
                    parts.append(part.inner("items"))
            return self.expression(parts, levels - 1) if place < high else None

        low, high = case.limits("Items")
        firsts = max([1, *map(len, case.all("prefixItems"))])
        is_tuple = any(case.all("prefixItems")) and not case.all("items")
        text, more = "", None if is_tuple else item(firsts)
        if low > (firsts if more is None else high):
            return None
        if more is not None:
            text = f"(?:{_COMMA}{more}){between(max(low - firsts, 0), high - firsts)}"
        for place in reversed(range(firsts)):
            one = item(place)
            if one is None and low > place:
                return None
            text = "" if one is None else f"{_COMMA if place else ''}{one}{text}"
            if low <= place:
                text = f"(?:{text})?"
        return rf"\[[ ]?{text}[ ]?\]"

    def _object(self, case: _Case, levels: int) -> str | None:
        names, required = _names(case), set(itertools.chain(*case.all("required")))
        fields = []
        for name in [""] if names is None else names:
            text = self.expression(_property(case, name), levels - 1)
            if text is None and name in required:
                return None
            if text is not None:
                key = _STRING if names is None else _literal(name)
                fields.append((f"{key}{_COLON}{text}", name in required))
        some = _some(fields) if fields else ""
        if names is None and some:
            some += f"(?:{_COMMA}{some})*"
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
        is_known = not _KINDS[name] or type(value) in _KINDS[name]
        if name == "type":
            is_known &= all(one in list(_TYPES) for one in _listed(value))
        elif name == "required":
            is_known &= all(isinstance(one, str) for one in _listed(value))
        elif name == "format" and is_known:
            is_known = value in FORMATS
        if not is_known:
            raise part.refusal(name, f"cannot be {value!r}")
    return part.schema


def _inner(part: _Part, name: str) -> list[_Part]:
    return [part.inner(name, place) for place in range(len(part.schema.get(name, ())))]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _types(case: _Case, is_written: bool = False) -> set[str]:
    """Returns the types of a case; as written, those that its keywords speak of."""
    found = set.union(*_TYPES.values())
    given = case.all("type")
    for types in given:
        found &= set.union(set(), *(_TYPES[one] for one in _listed(types)))
    if is_written and not given:
        meant = {name for name in _KEYWORDS if any(map(case.all, _KEYWORDS[name]))}
        found = (meant & found) or found
    return found


def _type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", list: "array", dict: "object"}
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return "integer" if type(value) is int else kinds.get(type(value), "null")


def _values(case: _Case) -> dict[str, Any] | None:
    """Returns what `enum` and `const` leave, by its JSON; `None` for any value."""
    given = [*case.all("enum"), *([value] for value in case.all("const"))]
    if not given:
        return None
    tables = [{json.dumps(one, sort_keys=True): one for one in ones} for ones in given]
    types = _types(case)
    return {
        key: value
        for key, value in tables[0].items()
        if _type_of(value) in types and all(key in table for table in tables)
    }


def _names(case: _Case) -> list[str] | None:
    """Returns the properties that a case writes, `None` for any."""
    given = [*case.all("properties"), *filter(None, case.all("required"))]
    return list(dict.fromkeys(itertools.chain(*given))) if given else None


def _property(case: _Case, name: str = "") -> list[_Part]:
    """Returns the schemas of one property."""
    found = []
    for part in case.parts:
        if name in part.schema.get("properties", ()):
            found.append(part.inner("properties", name))
        elif "additionalProperties" in part.schema:
            found.append(part.inner("additionalProperties"))
    return found


def _string(case: _Case) -> str | None:
    patterns = {*case.all("pattern")}
    patterns |= {f"^(?:{FORMATS[name]})$" for name in case.all("format")}
    if len(patterns) > 1:
        raise case.refusal(["pattern", "format"], "is one of two; give one of them")
    try:
        return string_expression("".join(patterns), *case.limits("Length"))
    except InputError as error:
        raise case.refusal(
            _KEYWORDS["string"], f"cannot be followed: {error}"
        ) from error


def _literal(value: Any) -> str:
    """Returns the expression of one value, with spaces where they may be."""
    if isinstance(value, dict):
        pairs = (f"{_literal(name)}{_COLON}{_literal(value[name])}" for name in value)
        return rf"\{{[ ]?{_COMMA.join(pairs)}[ ]?\}}"
    if isinstance(value, list):
        return rf"\[[ ]?{_COMMA.join(map(_literal, value))}[ ]?\]"
    return re.escape(json.dumps(value, ensure_ascii=False))
