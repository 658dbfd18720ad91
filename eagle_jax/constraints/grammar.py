"""From a regular expression or a JSON schema to an automaton over a pair's tokens.

outlines-core turns an expression into an automaton over bytes. What a token does is
what its bytes do one after the other, so a token is a function from states to states.
Few functions differ: they are composed once each, not once per token.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_jax.constraints.automaton import DEAD, START, AutomatonParams, make_tables
from eagle_jax.constraints.json_schema import schema_expression
from eagle_jax.errors import InputError

MAX_BYTES = 256 * 2**20
"""The size of the largest tables: 4 bytes for each state and class of tokens."""

_MAX_SECONDS = 30
_MAX_MEMORY = 2**30
_BYTE = 256

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""What vocabularies of sentencepiece's kind call a byte."""

# A process of its own: the library has no limit, and hears no Ctrl-C. And a byte that
# ends every text: of an expression that could end earlier, the library loses texts that
# go on ("a|ab", or a byte after "1" in "1(.5)?"), as the search that it builds on may.
# The same byte begins JSON, which never holds it: the search, which may begin at any
# byte, would else follow all beginnings at once, for minutes in objects of any kind.
_COMPILE = """
import contextlib, json, sys
with contextlib.suppress(ImportError, OSError, ValueError):  # Not on every system.
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # If the parent dies.
try:
    from outlines_core import Index, Vocabulary
except ImportError as error:
    sys.exit(f"{error}; pip install '.[grammar]' in the clone brings it")
regex, is_json = json.load(sys.stdin)
try:
    vocabulary = Vocabulary(256, {bytes([b]): [b] for b in range(256)})
    try:  # On its own, after what nothing matches: "a)|(b" would split the group.
        Index("[^\\s\\S]" + regex, vocabulary)
    except Exception as error:
        if "incompatible" not in str(error):
            raise
    index = Index("\\x00" * is_json + "(?:" + regex + ")\\x00", vocabulary)
    start, moves = index.get_initial_state(), index.get_transitions()
    start = moves[start][0] if is_json else start
    moves = [[a, b, c] for a, by in moves.items() for b, c in by.items()]
    print(json.dumps([start, list(index.get_final_states()), moves]))
except Exception as error:
    sys.exit(str(error) or repr(error))
"""


@functools.lru_cache(maxsize=8)
def compile_grammar(
    tokenizer: Any, stop_tokens: tuple[int, ...], vocab_size: int, given: str
) -> AutomatonParams:
    """Returns the automaton of the texts that match as a whole.

    Stop tokens are allowed where a text matches, other special tokens and U+0000
    nowhere. The last few automata are kept, for calls with equal arguments.

    Args:
        tokenizer: A `transformers` tokenizer.
        stop_tokens: The token ids that end a text.
        vocab_size: The number of tokens the target knows, `V`.
        given: A JSON list, `Request.grammar`: a regular expression in the syntax
            of Rust's regex-automata, without look-around, back references and anchors,
            and a JSON schema, as text or as the object that it describes; one of them
            is null.

    Raises:
        InputError: If the library refuses it or is not installed, a schema has a
            keyword that is not supported, the automaton is too large, or the tokenizer
            cannot write its texts.
    """
    stops = [token for token in stop_tokens if token < vocab_size]
    if not stops:
        raise InputError(
            "a text with `regex` or `json_schema` ends with a stop token, but this "
            f"target has none below its vocabulary's size, {vocab_size}; correct "
            "eos_token_id in its config.json"
        )
    table, is_final = _byte_automaton(given)
    written = token_bytes(tokenizer, vocab_size)
    for token in stops:
        written[token] = None
    return make_tables(*_over_tokens(table, is_final, written, stops))


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes | None]:
    """Returns what each token adds to a text; `None` for those that add no text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = (json.loads(backend.to_str())["decoder"] if backend else None) or {}
    kinds = {part.get("type") for part in decoder.get("decoders", [decoder])}
    alphabet = byte_alphabet() if "ByteLevel" in kinds else None
    if alphabet is None and not kinds & {"ByteFallback", "Metaspace"}:
        raise InputError(
            "`regex` and `json_schema` need the bytes of every token, but this "
            "tokenizer is neither byte-level nor of sentencepiece's kind; leave them "
            "out or choose another target"
        )

    def read(token: str) -> bytes | None:
        if alphabet is not None:
            known = [alphabet[one] for one in token if one in alphabet]
            return bytes(known) if len(known) == len(token) else None
        if (found := BYTE_TOKEN.fullmatch(token)) and "ByteFallback" in kinds:
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()

    vocabulary = tokenizer.get_vocab()
    # Added tokens may lie beyond the target's.
    written: list[bytes | None] = [None] * (1 + max(vocab_size, *vocabulary.values()))
    for token, number in vocabulary.items():
        written[number] = read(token)
    for number, added in tokenizer.added_tokens_decoder.items():
        written[number] = None if added.special else added.content.encode()
    for number in tokenizer.all_special_ids:
        written[number] = None
    return written[:vocab_size]


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character in byte-level vocabularies (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _byte_automaton(given: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[states, 256]` int32, the next states, and `[states]` bool, the ends."""
    start, finals, moves = _ask_library(given)
    states = [start, *sorted({move[0] for move in moves} - {start})]
    place = {state: START + number for number, state in enumerate(states)}
    table = np.full((START + len(states), _BYTE), DEAD, np.int32)
    for state, byte, after in moves:
        if byte < _BYTE and after in place:
            table[place[state], byte] = place[after]
    is_final = np.isin(table[:, 0], [place[state] for state in finals])
    table[:, 0] = DEAD
    return table, is_final


def _ask_library(given: str) -> Any:
    """Returns the start, the ends and the moves of what outlines-core builds."""
    regex, schema = json.loads(given)
    shown = f"`regex` {regex!r}" if schema is None else f"`json_schema` {schema!r}"
    regex = regex if schema is None else schema_expression(schema)
    reason = "it takes too long"
    limits = f"SECONDS, MEMORY = {int(_MAX_SECONDS) + 1}, {_MAX_MEMORY}"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            # Nothing of the current folder is imported: not by its name, and not by an
            # empty entry of PYTHONPATH, which then names a folder without modules.
            [sys.executable, "-P", "-c", limits + _COMPILE],
            cwd=os.sep,
            input=json.dumps([regex, schema is not None]),
            capture_output=True,
            text=True,
            timeout=_MAX_SECONDS,
        )
        if done.returncode == 0:
            return json.loads(done.stdout)
        said = done.stderr.strip() or f"it ended with {done.returncode}"
        reason = said.splitlines()[-1][:200]
    raise InputError(
        f"{shown} cannot be compiled by outlines-core: {reason}; {_MAX_SECONDS} s and "
        f"{_MAX_MEMORY / 2**30:g} GiB are allowed"
    )


def _over_tokens(
    table: np.ndarray,
    is_final: np.ndarray,
    written: Sequence[bytes | None],
    stops: list[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the automaton over tokens, see `make_tables`, of `_byte_automaton`."""
    num_states = len(table)
    columns = [np.arange(num_states, dtype=np.int32), np.zeros(num_states, np.int32)]
    same, dead = range(2)
    number_of = {column.tobytes(): number for number, column in enumerate(columns)}

    @functools.cache
    def then(before: int, byte: int) -> int:
        column = table[columns[before], byte]
        number = number_of.setdefault(column.tobytes(), len(columns))
        if number == len(columns):
            columns.append(column)
            if (size := 4 * num_states * len(columns)) > MAX_BYTES:
                raise InputError(
                    f"the automaton is too large: {num_states} states and "
                    f"{len(columns)} classes of tokens or more take over "
                    f"{size / 2**20:.0f} MiB; allow fewer repetitions"
                )
        return number

    functions = [functools.reduce(then, one, same) if one else dead for one in written]
    used, class_of = np.unique(functions, return_inverse=True)
    class_of[stops] = len(used)
    next_state = np.zeros((num_states + 1, len(used) + 1), np.int32)
    next_state[:-1, :-1] = np.stack([columns[number] for number in used], axis=1)
    # Once a text has ended, only its end may be said again.
    next_state[[*np.flatnonzero(is_final), num_states], -1] = num_states
    can_end = _reaches(next_state, num_states)
    if not can_end[START]:
        raise InputError(
            "no text of this tokenizer's tokens matches the given `regex` or "
            "`json_schema`; check it with an example"
        )
    return np.where(can_end[next_state], next_state, DEAD), class_of


def _reaches(next_state: np.ndarray, end: int) -> np.ndarray:
    """Returns which states have a way to another one, `[states]` bool."""
    num_states = len(next_state)
    edges = np.unique(
        next_state.astype(np.int64) * num_states + np.arange(num_states)[:, None]
    )
    after, before = divmod(edges, num_states)
    starts = np.searchsorted(after, np.arange(num_states + 1))
    found, waiting = np.zeros(num_states, bool), [end]
    while waiting:
        state = waiting.pop()
        if state != DEAD and not found[state]:
            found[state] = True
            waiting += before[starts[state] : starts[state + 1]].tolist()
    return found
