"""The flags that name a pair and the prompts that it is measured on."""

import argparse
from pathlib import Path
from typing import Any

from eagle_jax import assets
from eagle_jax.cli.command import Parser, say
from eagle_jax.cli.files import read_prompts
from eagle_jax.config import CONFIGS
from eagle_jax.engine import Pair, PairConfig, load_pair
from eagle_jax.engine.calls import check_memory
from eagle_jax.errors import InputError
from eagle_jax.parallel import MeshShape

_EMBEDDED_PROMPTS = Path(assets.__file__).parent / "prompts.json"


_FLAGS: dict[str, dict[str, Any]] = {
    "config": {"type": Path, "help": "settings from a TOML file; flags win"},
    "target": {"help": "a Hugging Face folder or hub name; default the embedded pair"},
    "draft": {"help": "its EAGLE head, Medusa or Hydra heads, or a smaller model"},
    "prompts": {"type": Path, "help": ".txt (a line each), .json list or .jsonl"},
    "chat": {"action": "store_true", "help": "wrap prompts in the chat template"},
    "generation-config": {
        "choices": ["auto", "none"],
        "default": "auto",
        "help": "auto draws as the target's generation_config.json says",
    },
}


def add_flags(parser: argparse._ActionsContainer, *names: str, **more: Any) -> None:
    """Adds flags of a pair; `more` is what the command says otherwise of them."""
    for name in names:
        parser.add_argument(f"--{name}", **_FLAGS[name] | more)


def add_pair_flags(parser: Parser) -> argparse._ArgumentGroup:
    """Adds the flags of a pair and its prompts; returns their group."""
    group = parser.add_argument_group("pair and prompts")
    add_flags(group, "target", "draft", "prompts", "chat")
    return group


def choose_embedded(arguments: argparse.Namespace) -> bool:
    """Names the embedded pair where no part of one is named; returns whether it did."""
    is_embedded = arguments.target is None and arguments.draft is None
    if is_embedded:
        arguments.target = str(assets.TARGET)
        if "config" in arguments:  # Measurements have settings of their own.
            arguments.config = arguments.config or CONFIGS / "embedded.toml"
    return is_embedded


def open_named(
    arguments: argparse.Namespace, config: PairConfig, mesh: MeshShape | None = None
) -> Pair:
    """Opens the pair of the flags, whose weights are not read yet.

    Args:
        arguments: The flags; where `target` is that of the embedded pair, `draft` is
            filled in. Without `generation_config` the target's own is not read.
        config: All settings.
        mesh: The shape of the mesh, see `load_pair`.

    Raises:
        InputError: If half of the pair is missing.
    """
    weights = config.method_row.weights
    is_embedded = arguments.target == str(assets.TARGET)
    if is_embedded and arguments.draft is None and weights is not None:
        arguments.draft = weights.embedded and str(weights.embedded)
    if arguments.target is None:
        raise InputError(
            "give --target FOLDER with --draft FOLDER, or neither for the embedded pair"
        )
    return load_pair(
        arguments.target,
        arguments.draft,
        config,
        mesh=mesh,
        is_lazy=True,
        generation_config=getattr(arguments, "generation_config", "none"),
    )


def open_measured(
    arguments: argparse.Namespace, config: PairConfig, *, least: int
) -> tuple[Pair, list[list[int]]]:
    """Opens the pair of the flags, the embedded one where none is named.

    Args:
        arguments: The flags of the pair; those of the embedded pair are filled in.
        config: The settings, of which the method is read, the tree, and the lengths of
            the texts and the batches that must be in memory.
        least: The number of prompts that are needed.

    Returns:
        The pair, whose weights are not read yet, and the prompts that the target has
        positions for: what is too long is left out aloud.

    Raises:
        InputError: If a part of the pair is missing, or there are too few prompts.
    """
    if choose_embedded(arguments):
        arguments.prompts = arguments.prompts or _EMBEDDED_PROMPTS
    if arguments.prompts is None:
        raise InputError("give --prompts FILE: what is measured depends on the text")
    pair = open_named(arguments, config)
    new_tokens = config.request.max_new_tokens
    check_memory(pair, batch_size=config.batch_size, max_length=1 + new_tokens)
    longest = pair.max_positions - new_tokens
    if longest < 1:
        raise InputError(
            f"--max-new-tokens {new_tokens} leaves no room for a prompt; the target "
            f"has {pair.max_positions} positions"
        )
    texts = read_prompts(arguments.prompts)
    encoded = [pair.encode(text, chat=arguments.chat) for text in texts]
    fitting = [ids for ids in encoded if len(ids) <= longest]
    if len(fitting) < least:
        raise InputError(
            f"{arguments.prompts} has {len(fitting)} prompts of up to {longest} tokens "
            f"and {least} are needed; give more prompts"
        )
    if missing := len(encoded) - len(fitting):
        say(f"warning: {missing} prompts of over {longest} tokens are left out")
    say(f"loading {arguments.target}")
    return pair, fitting
