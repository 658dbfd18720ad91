"""Talks with a chat model in the terminal.

    eagle-jax chat --target FOLDER --draft FOLDER
    eagle-jax chat --target FOLDER --method lookup --system "Be brief."

The conversation so far is in memory: with each turn only what is new is read, and with
it what fills no whole chunk of 64 tokens before. /reset begins another conversation,
Ctrl-C ends an answer, the end of the input (Ctrl-D) the chat. Answers go to standard
output, their figures to standard error.
"""

import argparse
import contextlib
import dataclasses
import importlib
import re
import sys
import time
from typing import Any

from eagle_jax.cli.command import Parser, command, say
from eagle_jax.cli.pair_flags import add_flags, open_named
from eagle_jax.cli.settings import PAIR_GROUPS, add_groups, add_settings, join_settings
from eagle_jax.config import DRAWS
from eagle_jax.engine import Engine, Generation, PairConfig, Request
from eagle_jax.engine.programs import PROGRAMS
from eagle_jax.engine.wording import Message
from eagle_jax.errors import InputError
from eagle_jax.reporting import decimals

_HELP = "/reset begins anew, /help shows this, Ctrl-C ends an answer, Ctrl-D the chat"


@command()
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    config = join_settings(arguments.config, arguments)
    pair = open_named(arguments, config)
    if not pair.tokenizer.chat_template:
        raise InputError(
            f"{arguments.target} has no chat template; give --target a chat model, or "
            "let eagle-jax generate --stream continue a text"
        )
    longest = config.max_length or pair.max_positions
    draws: dict[str, Any] = {name: getattr(arguments, name) for name in DRAWS}
    most = arguments.max_new_tokens or longest
    settings = pair.request(max_new_tokens=most, **draws)
    say(f"loading {arguments.target}")
    engine = pair.engine(batch_size=1, max_length=longest)
    with contextlib.suppress(ImportError):  # Lines that can be edited; not on Windows.
        importlib.import_module("readline")
    start: list[Message] = []
    if arguments.system is not None:
        start.append({"role": "system", "content": arguments.system})
    say("compiling")
    first = pair.encode([*start, {"role": "user", "content": "Hello"}])
    short = dataclasses.replace(settings, max_new_tokens=2)
    # Its first turn finds read what the system says.
    engine.write([pair.text(first, short)])
    say(_HELP)
    messages = [*start]
    while (line := _read_line()) is not None:
        if line == "/reset":
            messages = [*start]
        elif re.match(r"/[A-Za-z]+(\s|$)", line):
            wrong = f"error: {line!r} is no command here; "
            say(wrong * (line != "/help") + _HELP)
        elif line.strip():
            asked: Message = {"role": "user", "content": line.strip()}
            try:
                answer = _answer(engine, [*messages, asked], settings)
            except InputError as error:  # Too long, most likely: /reset helps.
                say(f"error: {error}; /reset begins another conversation")
                continue
            messages += [asked, {"role": "assistant", "content": answer}]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    what = "a Hugging Face folder or hub name of a model with a chat template"
    add_flags(parser, "config")
    add_flags(parser, "target", required=True, metavar="FOLDER", help=what)
    add_flags(parser, "draft", "generation-config")
    parser.add_argument("--system", help="what the system says before a conversation")
    group = parser.add_argument_group("answers")
    room = "tokens of an answer; default what there is room for"
    group.add_argument("--max-new-tokens", type=int, help=room)
    add_settings(group, PairConfig, *DRAWS, "seed")
    add_groups(parser, PairConfig, PAIR_GROUPS)
    return parser.parse_args(argv)


def _read_line() -> str | None:
    """Returns what the user says, `None` at the end of the input.

    On a terminal Ctrl-C asks once; it ends the command where it follows itself.
    """
    is_terminal = asks = sys.stdin.isatty()
    while True:
        try:
            return input("> " if is_terminal else "").rstrip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not asks:
                raise
            asks = False
            say("\nCtrl-C again, or Ctrl-D, ends the chat")


def _answer(engine: Engine, messages: list[Message], settings: Request) -> str:
    """Shows the answer to a conversation as it is decided; returns it."""
    (text,) = engine.pair.texts([messages], settings)
    text.is_watched = True
    engine.add(text)
    told = ""
    started, compiled = time.monotonic(), PROGRAMS.compile_seconds
    try:
        for _ in engine.run():
            piece = text.piece()
            told += piece.text
            print(piece.text, end="", flush=True)
            if piece.generation is not None:
                print()
                compiled = PROGRAMS.compile_seconds - compiled
                seconds = time.monotonic() - started - compiled
                say(_figures(piece.generation, text.reused, seconds, compiled))
    except KeyboardInterrupt:  # What was said so far is the answer.
        engine.reset()
        print()
    return told


def _figures(answer: Generation, reused: int, seconds: float, compiled: float) -> str:
    """Returns the line below an answer."""
    size, read = len(answer.token_ids), len(answer.prompt_ids)
    return (
        f"[{size} tokens in {seconds:.1f} s, and {compiled:.1f} s of compiling | "
        f"{decimals(answer.tokens_per_round)} tokens/round | "
        f"{read - reused} of {read} prompt tokens read]"
    )
