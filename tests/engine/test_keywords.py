"""Keyword arguments of pairs and calls: what is typed, shown and taken."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import Pair, assets, load_embedded_pair, load_pair
from eagle_jax.cli.command import Parser
from eagle_jax.cli.request_flags import add_request_flags
from eagle_jax.config import Without
from eagle_jax.drafting import LookupConfig
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.keywords import PairKeywords, RequestKeywords
from eagle_jax.engine.request import Request, outside_names
from eagle_jax.methods import METHODS
from tests.helpers import refused


def hints(*kinds: type) -> dict[str, Any]:
    """The types of all fields, and `None`, which stands for what holds without."""
    found = {n: h for kind in kinds for n, h in typing.get_type_hints(kind).items()}
    return {name: hint | None for name, hint in found.items()}


def test_keywords_have_the_names_and_types_of_the_settings() -> None:
    assert typing.get_type_hints(RequestKeywords) == hints(Request)
    own = [method.settings for method in METHODS.values()]
    expected = hints(PairConfig, Request, *own) | {"tree": Any}
    assert typing.get_type_hints(PairKeywords) == expected


def test_every_setting_of_a_request_has_its_names_or_a_reason_to_have_none() -> None:
    parser = Parser()
    add_request_flags(parser)
    flags = vars(parser.parse_args([])).keys()
    page = Path(__file__).parents[2] / "docs" / "requests.md"
    rows = [one for one in page.read_text().splitlines() if one.startswith("| `")]
    for field in dataclasses.fields(Request):
        found = {
            "flag": field.name in flags,
            "openai": field.name in outside_names("openai").values(),
        }
        for by, is_named in found.items():
            assert is_named != isinstance(field.metadata.get(by), Without), (
                by,
                field.name,
            )
        assert any(f"`{field.name}`" in row for row in rows), field.name


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (load_pair, "num_nodes dtype mesh temperature"),
        (load_embedded_pair, "method max_ngram"),
        (Pair.generate, "temperature stop logit_bias"),
        (Pair.astream, "system acceptance chat"),
        (Pair.request, "max_new_tokens"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_help_shows_every_keyword(function: Callable[..., Any], named: str) -> None:
    parameters = inspect.signature(function).parameters
    assert set(named.split()) <= parameters.keys()
    assert all(x.kind != inspect.Parameter.VAR_KEYWORD for x in parameters.values())


def test_a_methods_own_settings_are_keywords_of_a_pair() -> None:
    target = str(assets.TARGET)
    pair = load_pair(target, method="lookup", num_nodes=5, max_ngram=2, is_lazy=True)
    assert pair.config.tree == LookupConfig(num_nodes=5, max_ngram=2)
    given = dataclasses.replace(pair.config.tree, depth=3)
    pair = load_pair(target, method="lookup", tree=given, width=1, is_lazy=True)
    assert pair.config.tree == dataclasses.replace(given, width=1)
    for wrong, named in {
        "min_match": "method lookup does not read `min_match`; leave it out, or choose",
        "num_node": "'num_node' is no setting; known are method, ",
    }.items():
        more: dict[str, Any] = {wrong: 3}
        refused(lambda more=more: load_pair(target, method="lookup", **more), named)


def test_the_embedded_pair_takes_settings_and_the_weights_of_its_method() -> None:
    pair = load_embedded_pair(method="small-model", num_nodes=8)
    assert pair.config.tree.num_nodes == 8
    assert pair.draft is not None
    assert pair.draft.folder == assets.SMALL
    refused(lambda: load_embedded_pair(method="medusa"), "medusa needs `draft`")
