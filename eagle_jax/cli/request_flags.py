"""The flags of single requests, and prompts that bring settings of their own."""

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from eagle_jax.cli.command import Parser
from eagle_jax.cli.files import read_prompts, read_settings
from eagle_jax.cli.pair_flags import add_flags
from eagle_jax.cli.settings import add_settings
from eagle_jax.config import Without
from eagle_jax.engine import Pair, PairConfig, Request, Text
from eagle_jax.errors import InputError
from eagle_jax.parsing import parse_json, read_json

_FLAGS = [
    field.name
    for field in dataclasses.fields(Request)
    if not isinstance(field.metadata.get("flag"), Without)
]


def add_request_flags(parser: Parser) -> None:
    """Adds the flags that become fields of `Request`, and those of prompts."""
    group = parser.add_argument_group("what is asked for")
    add_settings(group, PairConfig, *_FLAGS)
    group = parser.add_argument_group("how prompts are read")
    add = group.add_argument
    add("--system", help="what the system says before a conversation")
    add("--chat-template-kwargs", metavar="JSON", help="variables of the chat template")
    add("--truncate-prompt-tokens", type=int, help="keep so many last tokens")
    add_flags(group, "generation-config")


def take_request(arguments: argparse.Namespace) -> dict[str, Any]:
    """Takes the flags of requests out of those of a command, which keeps the others.

    The pair's own settings are none of theirs: flags win over what a checkpoint says,
    even where they say what a setting is by default.

    Raises:
        InputError: If a bias or the schema cannot be read.
    """
    given = {name: vars(arguments).pop(name) for name in _FLAGS}
    schema = arguments.schema_file = given["json_schema"]
    if schema and not schema.lstrip().startswith("{"):
        given["json_schema"] = read_json(Path(schema))
    given["logit_bias"] = given["logit_bias"] and _biases(given["logit_bias"])
    return {name: value for name, value in given.items() if value is not None}


def read_requests(
    arguments: argparse.Namespace, pair: Pair, given: dict[str, Any]
) -> tuple[Request, list[str], list[Text]]:
    """Returns the prompts of a command and the texts that it asks for.

    A line of a .jsonl file may hold an object `settings` beside its `prompt`: fields of
    `Request`, which win over flags.

    `given` are the flags of requests, see `take_request`.

    Returns:
        The settings that all share but for their seeds and what lines say, the prompt
        of each text, and the texts.

    Raises:
        InputError: If a prompt or a setting cannot be used.
    """
    prompts: list[str] = list(arguments.prompt)
    own: list[dict[str, Any]] = [{}] * len(prompts)
    if arguments.prompts == Path("-"):
        text = sys.stdin.read().removeprefix("\ufeff")  # A byte order mark.
        prompts, own = [*prompts, text], [*own, {}]
    elif arguments.prompts is not None:
        prompts += read_prompts(arguments.prompts)
        own += read_settings(arguments.prompts)
    shared = pair.request(**given)
    how = {
        "system": arguments.system,
        "chat_template_kwargs": _variables(arguments.chat_template_kwargs),
        "truncate_prompt_tokens": arguments.truncate_prompt_tokens,
    }
    encoded = [pair.encode(one, chat=arguments.chat, **how) for one in prompts]
    settings = [
        pair.request(**{**given, "seed": shared.seed + place * shared.n} | one)
        for place, one in enumerate(own)
    ]
    repeated = zip(prompts, settings, strict=True)
    each = [prompt for prompt, one in repeated for _ in range(one.n)]
    return shared, each, pair.texts(encoded, settings)


def _biases(given: list[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for one in given:
        try:
            id_, value = one.split("=")
            if not re.fullmatch("[0-9]+", id_):
                raise ValueError
            found[int(id_)] = float(value)
        except ValueError:
            raise InputError(f"--logit-bias {one} must be ID=VALUE, as 13=-2") from None
    return found


def _variables(given: str | None) -> dict[str, Any]:
    found = parse_json(given or "{}", "--chat-template-kwargs")
    if not isinstance(found, dict):
        raise InputError(f"--chat-template-kwargs {given} must be a JSON object")
    return found
