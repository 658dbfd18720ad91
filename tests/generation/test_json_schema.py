"""What a schema's automaton writes follows the schema, as `jsonschema` judges it."""

import datetime
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

from eagle_jax.automaton import DEAD, START
from eagle_jax.errors import InputError
from eagle_jax.generation import grammar

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


@CHECKER.checks("email")
def is_email(value: Any) -> bool:
    return not isinstance(value, str) or value.count("@") == 1


def follows(schema: Any, text: str) -> bool:
    judge = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    return judge.is_valid(json.loads(text))


NAMES = ["a", "b", "c", 'q"', "\\", "x\ny", "é/~", "\x01", "."]
PATTERNS = [
    "a", "^a|b$", "^a.b$", r"^\d+$", r"\D", "[^a]", r"^[^\d\"]{2,3}$", r"^\W$", r"^\w*$",
    r"^(?:ab|c)+$", r"\\", '"', "^[a-c]{1,4}$", r"^\S+\s?$", "^$", "", "^", "a|b|^c",
    r"^\u00e9\x41\/?$", "^[]-a-]*$".replace("]", r"\]"), r"^(\d{2}|x(y|z)*)?$", r"[\n\t]",
    r"^[\s\S]$", r"^\.{2}$", r"^\ud83d\ude00?$", r"a{2}b{1,}", r"^[+*.?^$-]+$",
]  # fmt: skip
FORMATS = ["date", "time", "date-time", "uuid", "email", "uri", "ipv4"]
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
        minProperties=st.integers(0, 1),
        maxProperties=SMALL,
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
    suppress_health_check=list(HealthCheck),
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
