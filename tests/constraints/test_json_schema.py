"""What a schema's automaton writes follows the schema, as `jsonschema` judges it."""

import datetime
import itertools
import json
import random
import re
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from eagle_jax.constraints import grammar
from eagle_jax.constraints.automaton import DEAD, START
from eagle_jax.errors import InputError
from tests.helpers import refused

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("outlines_core")

Automaton = tuple[np.ndarray, np.ndarray]


def automaton(schema: Any) -> Automaton:
    return grammar._byte_automaton(json.dumps([None, json.dumps(schema)]))


def accepts(made: Automaton, text: str) -> bool:
    state = START
    for byte in text.encode():
        state = made[0][state, byte]
    return state != DEAD and bool(made[1][state])


def walks(made: Automaton, seed: int, count: int) -> Iterator[str]:
    """Random texts; after some steps each goes the shortest way to its end."""
    table, is_final = made
    draw = random.Random(seed)
    far = np.where(is_final, 0, len(table) + 1)
    far[DEAD] = len(table) + 1
    for _ in range(len(table)):
        closer = np.minimum(far, far[table].min(axis=1) + 1)
        closer[DEAD] = len(table) + 1
        if (closer == far).all():
            break
        far = closer
    for _ in range(count):
        state, text, length = START, b"", draw.choice([0, 10, 40, 150])
        while not (is_final[state] and (len(text) >= length or draw.random() < 0.2)):
            ways = sorted(set(table[state].tolist()) - {DEAD})
            ways = [way for way in ways if far[way] <= len(table)]
            if not ways:
                break
            if len(text) >= length:
                state_after = min(ways, key=far.__getitem__)
            else:
                state_after = draw.choice(ways)
            bytes_ = np.flatnonzero(table[state] == state_after).tolist()
            text, state = text + bytes([draw.choice(bytes_)]), state_after
        assert is_final[state]
        yield text.decode()


CHECKER = jsonschema.FormatChecker(())


@CHECKER.checks("date", ValueError)
def is_date(value: Any) -> bool:
    return not isinstance(value, str) or bool(datetime.date.fromisoformat(value))


@CHECKER.checks("time", ValueError)
def is_time(value: Any) -> bool:
    return is_moment(f"1970-01-01T{value}") if isinstance(value, str) else True


@CHECKER.checks("date-time", ValueError)
def is_moment(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    date, _, time = value.partition("T")
    known = re.fullmatch(r"(..:..:..)(\.[0-9]+)?(Z|[+-]..:..)", time, flags=re.ASCII)
    assert known, value
    zone = known[3].replace("Z", "+00:00")
    return bool(datetime.datetime.fromisoformat(f"{date}T{known[1]}{zone}"))


@CHECKER.checks("uuid", ValueError)
def is_uuid(value: Any) -> bool:
    return not isinstance(value, str) or str(uuid.UUID(value)) == value


def follows(schema: Any, text: str) -> bool:
    judge = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    return judge.is_valid(json.loads(text))


NAMES = ["a", "b", "c", 'q"', "\\", "x\ny", "é/~", "\x01", "."]
PATTERNS = [
    *("a", "^a|b$", "a|b|^c", "^a.b$", "^$", "", "^", r"^\d+$", r"\D", "[^a]", '"'),
    *(r"^[^\d\"]{2,3}$", r"^\W$", r"^\w*$", r"^(?:ab|c)+$", r"\\", "^[a-c]{1,4}$"),
    *(r"^\S+\s?$", r"^\u00e9\x41\/?$", r"^[\]-a-]*$", r"^(\d{2}|x(y|z)*)?$", r"[\n\t]"),
    *(r"^[\s\S]$", r"^\.{2}$", "^\U0001f600?$", "a{2}b{1,}", "^[+*.?^$-]+$", "[^a-z]"),
    *(r"^[\w.-]+@[^.@]+$", r"^[^.]{2}$", r"^[.]|[$|(*]$", r"^\S[^\S]$", "^a{0}b{2,}?$"),
]
FORMATS = ["date", "time", "date-time", "uuid"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([1.0, 0.5, -1e-7, 1e30, 1e300]),
    st.sampled_from(NAMES),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.sampled_from(NAMES), SCALARS, max_size=2),
)
SMALL = st.integers(0, 3)


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with any of the keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


def typed(name: str, **keywords: st.SearchStrategy[Any]) -> Any:
    kinds = st.sampled_from([{"type": name}, {"type": [name, "null"]}, {}])
    return st.builds(lambda kind, rest: kind | rest, kinds, some(**keywords))


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
    objects = typed(
        "object",
        properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        required=names,
        additionalProperties=inner,
    )
    arrays = typed(
        "array",
        items=inner,
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=SMALL,
        maxItems=SMALL,
    )
    several = st.lists(inner, min_size=1, max_size=3)
    combined = st.one_of(
        *(several.map(lambda found, n=n: {n: found}) for n in ("allOf", "anyOf")),
        st.tuples(objects, several).map(lambda both: both[0] | {"anyOf": both[1]}),
        st.tuples(objects, objects).map(lambda both: {"allOf": [*both]}),
        several.map(
            lambda found: {
                "oneOf": [
                    {
                        "type": "object",
                        "allOf": [one],
                        "properties": {"kind": {"const": number}},
                        "required": ["kind"],
                    }
                    for number, one in enumerate(found)
                ]
            }
        ),
        several.map(lambda found: {"oneOf": found}),
    )
    return st.one_of(objects, objects, arrays, combined)


LEAVES = st.one_of(
    typed("string", minLength=SMALL, maxLength=SMALL),
    typed("string", pattern=st.sampled_from(PATTERNS)),
    typed(
        "string", pattern=st.sampled_from(PATTERNS), minLength=SMALL, maxLength=SMALL
    ),
    typed("string", format=st.sampled_from(FORMATS)),
    st.sampled_from(["null", "boolean", "integer", "number"]).map(
        lambda name: {"type": name}
    ),
    some(enum=st.lists(VALUES, min_size=1, max_size=3), const=VALUES),
    st.builds(lambda value: {"const": value, "title": "x"}, VALUES),
    st.sampled_from([True, False, {}, {"$ref": "#"}, {"$ref": "#/$defs/x~1y"}]),
)
SCHEMAS = st.builds(
    lambda root, inner: {**root, "$defs": {"x/y": inner}} if root else root,
    deeper(st.recursive(LEAVES, deeper, max_leaves=6)),
    LEAVES,
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_what_is_written_follows_its_schema(schema: Any, seed: int) -> None:
    try:
        made = automaton(schema)
    except InputError as error:
        event(str(error)[:40])
        assert "`json_schema`" in str(error) and "outlines" not in str(error)
        return
    for text in walks(made, seed, 8):
        event("written")
        assert follows(schema, text), text


CLASSES = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\w.-]", r"[^\s\"]", "[^1a]"]
ATOMS = st.sampled_from(["a", "1", ".", "é", '"', r"\\", r"\.", r"\n", *CLASSES])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3)
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?"])
    return st.one_of(
        several.map("".join),
        several.map(lambda ways: f"({'|'.join(ways)})"),
        st.tuples(inner, counts).map(lambda both: f"(?:{both[0]}){both[1]}"),
    )


WAYS = st.tuples(
    st.sampled_from(["^", ""]), st.recursive(ATOMS, larger), st.sampled_from(["$", ""])
)
SEARCHES = st.lists(WAYS.map("".join), min_size=1, max_size=2).map("|".join)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(pattern=SEARCHES)
def test_a_pattern_is_searched_for_as_python_does(pattern: str) -> None:
    made = automaton({"pattern": pattern})
    python = re.compile(pattern.replace("$", r"\Z"))
    for length in range(4):
        for characters in itertools.product('a1"\\\n -.', repeat=length):
            text = "".join(characters)
            is_found = python.search(text) is not None
            is_written = accepts(made, json.dumps(text, ensure_ascii=False))
            # Classes hold no character that JSON writes as an escape.
            is_plain = not {*text} & {*'"\\\n'}
            assert is_written == is_found or (is_found and not is_plain), text


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


INTEGER = {"type": "integer"}
TREE = {"$defs": {"t": obj(next={"$ref": "#/$defs/t"})}, "$ref": "#/$defs/t"}


@pytest.mark.parametrize(
    "schema, written, never",
    [
        (
            {"allOf": [obj(a=INTEGER), {**obj(b={}), "required": ["b"]}]},
            ['{"a":1,"b":[{"c":null}]}', '{ "b" : "" }'],
            ['{"a":1}{"b":1}', '{"a":1}', "{}", '{"b":1,"a":1}'],
        ),
        (
            {**obj(**{'q"': INTEGER, "\\": {}, "x\ny": {}}), "required": ["\\"]},
            [json.dumps({'q"': 1, "\\": 2, "x\ny": 3}), r'{"\\":0}'],
            ['{"q"":1,"\\\\":2}', '{"\\":2}'],
        ),
        ({"pattern": "^a.b$"}, ['"a-b"', '"aéb"'], ['"a"b"', r'"a\b"', r'"a\"b"']),
        ({"pattern": r'^a"\\\n$'}, [r'"a\"\\\n"'], [r'"a"\n"']),
        ({"pattern": r'^[\n"b]\x01?$'}, [r'"\n"', r'"\""', r'"b\u0001"'], ['"\n"']),
        ({"pattern": "^a|b$"}, ['"ax"', '"xb"', '"a"'], ['"xa"', '"bx"', "\"'"]),
        ({"pattern": "^[^a]$"}, ['"é"', '"b"', '"]"'], ['"a"', '"""', '"\n"']),
        ({"pattern": r"^[a&b~.\[-]+$"}, ['"a&b~[.-"'], ['"c"', '"]"']),
        ({"pattern": "a"}, ['"a"', '"xay"'], ['"b"', "1"]),
        ({"pattern": r"^\d+$"}, ['"12"'], ['"\u0661"', '"²"', '""']),
        (
            {"pattern": r"^\D\W\S$"},
            ['"é-é"', '". 1"'.replace(" ", "-")],
            ['"1-a"', '"aéa"', '"a- "'],
        ),
        ({"maxLength": 1}, ['"é"', r'"\n"', r'"\""', '""'], ['"ab"', r'"\u0041b"']),
        (
            {"format": "time"},
            ['"10:00:00Z"', '"10:00:00.5+01:00"'],
            ['"10:00:00"', "10:00:00Z"],
        ),
        (
            {"format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"0001-12-31"'],
            [
                '"2023-02-29"',
                '"1900-02-29"',
                '"2023-04-31"',
                '"0000-01-01"',
                '"\u0662023-01-01"',
            ],
        ),
        (
            {"format": "email"},
            ['"a.b+c@d-e.org"'],
            ['"a@b"', '"a b@c.org"', '"@c.org"'],
        ),
        (
            {"format": "uri"},
            ['"https://a-b.org:80/c?d=%C3%A9#e"', '"http://a.org"'],
            ['"a.org"', '"https://a.org/ "', '"https://a.org/%G0"'],
        ),
        (
            {"format": "date-time"},
            ['"2024-01-01T00:00:00Z"'],
            ['"2024-01-01T00:00:00"'],
        ),
        (
            {**obj(a=INTEGER), "required": ["z"]},
            ['{"a":1,"z":{"b":[]}}'],
            ['{"a":1}', "{}"],
        ),
        (
            {**obj(a={}), "required": ["z"], "additionalProperties": INTEGER},
            ['{"z":1}'],
            ['{"z":""}', '{"y":1,"z":1}'],
        ),
        (
            {"oneOf": [{**obj(k={"const": name}), "required": ["k"]} for name in "ab"]},
            ['{"k":"a"}', '{"k":"b"}'],
            ["{}", '{"k":"c"}'],
        ),
        (
            {
                "oneOf": [
                    {
                        **obj(**{name: {}}),
                        "required": [name],
                        "additionalProperties": False,
                    }
                    for name in "ab"
                ]
            },
            ['{"a":1}', '{"b":1}'],
            ['{"a":1,"b":1}'],
        ),
        ({"oneOf": [INTEGER, {"const": "a"}]}, ["1", '"a"'], ["null"]),
        (
            TREE,
            ["{}", '{"next":{"next":{"next":{}}}}'],
            ['{"next":{"next":{"next":{"next":{}}}}}', '{"next":1}'],
        ),
        (
            {"type": "array", "prefixItems": [INTEGER, {"const": "a"}], "minItems": 1},
            ["[1]", '[1, "a"]'],
            ["[]", '["a"]', '[1,"a",2]'],
        ),
        (
            {"items": INTEGER, "minItems": 2, "maxItems": 3},
            ["[1,2]", "[1 , 2,3]"],
            ["[1]", "[1,2,3,4]"],
        ),
        (
            {"type": "object"},
            ["{}", '{"a":{"b":[1.5,null,"x"]}}'],
            ["[]", '{"a":{"b":[[1]]}}'],
        ),
        (
            {},
            ["1e-07", "true", '{"a":[{"b":-1}]}', "[[[]]]"],
            ["", "01", "1.", "tru", '"\x7f"'],
        ),
        ({"type": ["integer", "null"]}, ["null", "-3"], ["1.0", '"a"']),
        ({"type": "integer", "enum": [1, "1", 2.0, 2.5]}, ["1", "2"], ['"1"', "2.5"]),
        (
            {"const": {"\x01": ["é", 1e300]}},
            [r'{"\u0001":["é",1e+300]}'],
            ['{"\x01":["é",1e+300]}'],
        ),
        ({"properties": {}, "items": {}}, ["{}", "[]"], ["1", '{"a":1}']),
    ],
)
def test_what_an_automaton_accepts(
    schema: Any, written: list[str], never: list[str]
) -> None:
    made = automaton(schema)
    for text in written:
        assert accepts(made, text) and follows(schema, text), text
    for text in never:
        assert not accepts(made, text), text
    for text in walks(made, 0, 20):
        assert follows(schema, text), text


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"properties": {"a/b": {"minimum": 1}}}, ["minimum at #/properties/a~1b is"]),
        ({"anyOf": [{"uniqueItems": True}]}, ["uniqueItems at #/anyOf/0 is not"]),
        ({"items": {"not": {}}}, ["not at #/items is not supported"]),
        ({"type": "string", "maxLenght": 3}, ["maxLenght at #", "'maxLength'?"]),
        ({"format": "hostname"}, ["format at # cannot be 'hostname'"]),
        ({"type": "strin"}, ["type at # cannot be 'strin'"]),
        ({"required": [1]}, ["required at # cannot be [1]"]),
        ({"properties": {"a": 1}}, ["1 at #/properties/a is no schema"]),
        ({"pattern": "(?=a)"}, ["pattern at #", "'(?=a)' is not supported"]),
        ({"pattern": r"(a)\1"}, ["pattern at #", r"'\\1' is not supported"]),
        ({"pattern": r"\bfoo"}, ["pattern at #", r"'\\b' is not supported"]),
        ({"pattern": "a^b"}, ["pattern at #", "'^' and '$'"]),
        ({"pattern": "(a"}, ["pattern at #", "'(' has no ')'"]),
        ({"pattern": "a)"}, ["pattern at #", "')' has no '('"]),
        ({"pattern": "[^]"}, ["pattern at #", "'[^]' is not supported"]),
        ({"pattern": "[b-a]"}, ["pattern at #", "wrong order"]),
        ({"pattern": r"[\d-z]"}, ["pattern at #", r"'\\d' is not supported"]),
        ({"pattern": r"\ud83d"}, ["pattern at #", "is not supported"]),
        ({"pattern": "a+", "maxLength": 3}, ["pattern at # must not", "length"]),
        ({"format": "date", "minLength": 1}, ["format at # must not", "length"]),
        ({"pattern": "a", "format": "date"}, ["pattern at # must not", "another"]),
        ({"enum": ["a"], "minLength": 3}, ["minLength at # must not", "enum"]),
        ({"oneOf": [INTEGER, {"type": "number"}]}, ["oneOf at #", "use anyOf"]),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, ["oneOf at #", "use anyOf"]),
        ({"oneOf": [{"const": 10**16}, {"const": 1e16}]}, ["oneOf at #", "use anyOf"]),
        ({"oneOf": [{"enum": [1], "pattern": "a"}, INTEGER]}, ["oneOf at #"]),
        ({"format": {}}, ["format at # cannot be {}"]),
        ({"oneOf": [obj(a=INTEGER), obj(b={})]}, ["oneOf at #", "use anyOf"]),
        ({"oneOf": [{"const": 1e300}, INTEGER]}, ["oneOf at #", "use anyOf"]),
        (
            {"oneOf": [{**obj(**{name: {}}), "required": [name]} for name in "ab"]},
            ["oneOf at #", "use anyOf"],
        ),
        ({"$ref": "#/$defs/a"}, ["$ref at # leads nowhere: '#/$defs/a'"]),
        ({"$ref": "other.json"}, ["$ref at # must begin with '#/'"]),
        ({"anyOf": [{"$ref": "#"}, INTEGER]}, ["$ref at #", "leads to itself"]),
        ({"items": {"$id": "x"}}, ["$id at #/items is not supported"]),
        ({**obj(a=False), "required": ["a"]}, ["no JSON follows"]),
        ({**obj(a={"$ref": "#"}), "required": ["a"]}, ["no JSON follows", "an end"]),
        ({"allOf": [INTEGER, {"type": "string"}]}, ["no JSON follows"]),
        ({"minLength": 2, "maxLength": 1}, ["no JSON follows"]),
        (False, ["no JSON follows"]),
        (1, ["1 at # is no schema"]),
        ({"const": "\ud800"}, ["`json_schema`", "surrogates"]),
        (
            {"$defs": {f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(2000)}}
            | {"$ref": "#/$defs/0"},
            ["nested too deep"],
        ),
        ({"allOf": [{"anyOf": [{}, {}]}] * 30}, ["over 1,048,576 char"]),
        ({"properties": {str(n): {} for n in range(99)}}, ["over 1,048,576 char"]),
    ],
)
def test_what_would_be_ignored_is_refused_with_its_place(
    schema: Any, words: list[str]
) -> None:
    refused(lambda: automaton(schema), "`json_schema`", *words)


def test_annotations_are_no_rules() -> None:
    notes = {"title": "t", "default": 1, "$comment": "", "x-y": 1, "examples": [2]}
    notes |= {"$id": "http://a", "$schema": "s", "description": "d", "readOnly": True}
    assert accepts(automaton({"type": "null"} | notes), "null")


def test_digits_of_every_script_are_digits() -> None:
    """Python's `\\d` takes them; so `\\D` must not be written with one."""
    made = automaton({"pattern": r"^\D$"})
    digits = [chr(code) for code in range(0x110000) if chr(code).isdecimal()]
    assert accepts(made, '"é"')
    assert not any(accepts(made, f'"{one}"') for one in digits)
