"""The flags of single requests, and prompts that bring settings of their own."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from eagle_jax.cli.command import Parser
from eagle_jax.cli.files import read_prompts, read_settings
from eagle_jax.cli.settings import add_settings
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.pair import Pair
from eagle_jax.engine.request import Asked, each_sample
from eagle_jax.errors import InputError
from eagle_jax.parsing import read_json

_PLAIN = (
    *("min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("no_repeat_ngram_size", "logprobs", "prompt_logprobs"),
)
_GIVEN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens"),
    *("ignore_eos", "stop", "stop_token_ids", "bad_words", "n", "regex"),
    "skip_special_tokens",
)


def add_request_flags(parser: Parser) -> None:
    """Adds the flags that become fields of `Request`, and those of prompts."""
    group = parser.add_argument_group("what is asked for")
    add = group.add_argument
    sampling = "max_new_tokens temperature top_p top_k min_p seed ignore_eos"
    add_settings(group, PairConfig, *sampling.split())
    add("--num-samples", dest="n", type=int, help="texts per prompt; default 1")
    add("--stop", action="append", metavar="TEXT", help="ends the text before it")
    add("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end the text, too")
    add("--bad-words", nargs="+", metavar="TEXT", help="what no text contains")
    bias = "what is added to the logits of tokens"
    add("--logit-bias", nargs="+", metavar="ID=VALUE", help=bias)
    regex = "texts match this regular expression (extra grammar)"
    add("--regex", metavar="PATTERN", help=regex)
    schema = "texts are JSON of this schema (extra grammar)"
    add("--json-schema", type=Path, metavar="FILE", help=schema)
    add_settings(group, PairConfig, *_PLAIN)
    add(
        "--keep-special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        default=None,
        help="write special tokens, too",
    )
    add = parser.add_argument_group("how prompts are read").add_argument
    add("--system", help="what the system says before a conversation")
    add("--chat-template-kwargs", metavar="JSON", help="variables of the chat template")
    add("--truncate-prompt-tokens", type=int, help="keep so many last tokens")
    auto = "auto draws as the target's generation_config.json says"
    add("--generation-config", choices=["auto", "none"], default="auto", help=auto)


def read_requests(
    arguments: argparse.Namespace, pair: Pair
) -> tuple[list[str], list[Asked]]:
    """Returns the prompts of a command and the texts that it asks for.

    A line of a .jsonl file may hold an object `settings` beside its `prompt`: fields of
    `Request`, which win over flags.

    Raises:
        InputError: If a prompt or a setting cannot be used.
    """
    given = {
        name: getattr(arguments, name)
        for name in (*_PLAIN, *_GIVEN)
        if getattr(arguments, name, None) is not None
    }
    given |= {"json_schema": arguments.json_schema and read_json(arguments.json_schema)}
    given |= {"logit_bias": arguments.logit_bias and _biases(arguments.logit_bias)}
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
    texts = [prompt for prompt, one in repeated for _ in range(one.n)]
    return texts, each_sample(encoded, settings)


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
    try:
        found = json.loads(given or "{}")
    except ValueError as error:
        raise InputError(f"--chat-template-kwargs is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"--chat-template-kwargs {given} must be a JSON object")
    return found
