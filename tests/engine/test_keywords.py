"""Keyword arguments of pairs and calls: what is typed, shown and taken."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest

from eagle_jax import Pair, assets, load_embedded_pair, load_pair
from eagle_jax.drafting import LookupConfig
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.keywords import PairKeywords, RequestKeywords
from eagle_jax.engine.request import Request
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


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (load_pair, {"num_nodes": 60, "dtype": "auto", "mesh": None}),
        (load_embedded_pair, {"method": "eagle2", "max_ngram": 3}),
        (Pair.generate, {"temperature": 0.0, "stop": (), "logit_bias": None}),
        (Pair.astream, {"system": None, "acceptance": None, "chat": False}),
        (Pair.request, {"max_new_tokens": 128}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_help_shows_every_keyword_with_its_default(
    function: Callable[..., Any], named: dict[str, Any]
) -> None:
    parameters = inspect.signature(function).parameters
    assert all(parameters[name].default == usual for name, usual in named.items())
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
