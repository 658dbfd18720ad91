"""A run beside plain decoding, in as many turns as it takes to tell which is faster."""

import time
from typing import Any

import jax

from eagle_jax.cli.session import Session
from eagle_jax.engine import Pair

_SECONDS, _FEWEST, _MOST, _SPREAD = 10.0, 3, 9, 1.2


def compare(
    drafted: Session, plain_pair: Pair, *, is_other: bool
) -> dict[str, Any] | None:
    """Decodes the texts of a run plainly and, if they are short, both again in turns.

    In the fraction of a second that a short text takes another program may slow down
    either way. Turns end where their ratios are near each other, or after some seconds.

    Args:
        drafted: The run, which has ended.
        plain_pair: What decodes the same texts without drafts.
        is_other: Whether plain decoding draws other tokens.

    Returns:
        Fields of `Session.totals`: the speeds of the turn with the median ratio, the
        ratios of all turns, and whether tokens are identical, `None` for other draws.
        `None` if the comparison was interrupted.
    """
    plain = drafted.again(plain_pair)
    plain.warm_up()
    began = time.monotonic()
    finished, turns = plain.decode_all(), [(drafted, plain)]
    while finished and _is_open([*map(_ratio, turns)], time.monotonic() - began):
        turns.append((drafted.again(), plain.again()))
        finished = all(one.decode_all(has_progress=False) for one in turns[-1])
    if not finished:
        return None
    ours, theirs = sorted(turns, key=_ratio)[len(turns) // 2]
    return {
        "tokens_per_second": ours.speed,
        "autoregressive_tokens_per_second": theirs.speed,
        "speedup": _ratio((ours, theirs)) or None,
        "speedups": [*map(_ratio, turns)],
        "identical": None if is_other else all(a.ids == b.ids for a, b in turns),
    }


def _ratio(turn: tuple[Session, Session]) -> float:
    """Returns how much faster the first is; 0 where a text is too short for a speed."""
    return (turn[0].speed or 0.0) / (turn[1].speed or 1.0)


def _is_open(ratios: list[float], seconds: float) -> bool:
    """Returns whether another turn could tell more, and there is time for it."""
    has_time = seconds * (1 + 1 / len(ratios)) <= _SECONDS
    if not has_time or min(ratios) == 0 or jax.process_count() > 1:
        return False  # Several processes' clocks differ.
    is_near = len(ratios) >= _FEWEST and max(ratios) <= _SPREAD * min(ratios)
    return len(ratios) < _MOST and not is_near
