"""The flags that name a pair and the prompts that it is measured on."""

import argparse
from pathlib import Path

from eagle_jax import assets
from eagle_jax.cli.command import Parser, say
from eagle_jax.cli.files import read_prompts
from eagle_jax.errors import InputError
from eagle_jax.generation.pair import Pair
from eagle_jax.methods import find_method

_EMBEDDED_PROMPTS = Path(assets.__file__).parent / "prompts.json"


def add_pair_flags(parser: Parser) -> None:
    """Adds the flags of a pair and its prompts."""
    add = parser.add_argument
    add("--target", help="a Hugging Face folder or hub name; default the embedded pair")
    add("--draft", help="its EAGLE head, Medusa or Hydra heads, or a smaller model")
    add("--prompts", type=Path, help=".txt (a line each), .json list or .jsonl")
    add("--chat", action="store_true", help="wrap prompts in the chat template")


def complete_pair(arguments: argparse.Namespace) -> None:
    """Fills in the embedded pair where none is named.

    Args:
        arguments: The flags of the pair, and `method`, the method that drafts.

    Raises:
        InputError: If a part of the pair is missing.
    """
    weights = find_method(arguments.method).weights
    has_embedded = weights is None or weights.embedded is not None
    if has_embedded and arguments.target is None and arguments.draft is None:
        arguments.target = str(assets.TARGET)
        arguments.draft = weights and str(weights.embedded)
        arguments.prompts = arguments.prompts or _EMBEDDED_PROMPTS
    if arguments.target is None:
        raise InputError(
            "give --target FOLDER with --draft FOLDER, or neither for the embedded pair"
        )
    if arguments.prompts is None:
        raise InputError("give --prompts FILE: what is measured depends on the text")


def fitting_prompts(
    arguments: argparse.Namespace, pair: Pair, max_new_tokens: int
) -> list[list[int]]:
    """Reads the prompts that the target has positions for.

    Args:
        arguments: The flags of the pair.
        pair: The pair.
        max_new_tokens: The number of tokens to generate after each prompt.

    Returns:
        The prompts' ids; what is too long is left out aloud.

    Raises:
        InputError: If the prompts cannot be read, or none fits.
    """
    prompts = read_prompts(arguments.prompts)
    positions = pair.source.config.max_positions
    longest = positions - max_new_tokens
    if longest < 1:
        raise InputError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt; the "
            f"target has {positions} positions"
        )
    encoded = [pair.encode(text, chat=arguments.chat) for text in prompts]
    fitting = [ids for ids in encoded if len(ids) <= longest]
    if not fitting:
        raise InputError(
            f"{arguments.prompts} has no prompt of up to {longest} tokens; give one"
        )
    if len(fitting) < len(encoded):
        say(
            f"warning: {len(encoded) - len(fitting)} prompts of over {longest} tokens "
            "are left out"
        )
    return fitting
