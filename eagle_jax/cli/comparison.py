"""A run beside plain decoding, in as many turns as it takes to tell which is faster."""

import time
from typing import Any

import jax

from eagle_jax.cli.session import Session
from eagle_jax.generation.runner import Runner

_MOST_SECONDS = 10.0
_TURNS = (3, 9)
_SPREAD = 1.2


def compare(
    drafted: Session, plain_runner: Runner, *, is_other: bool
) -> dict[str, Any] | None:
    """Decodes the texts of a run plainly, and if they are short both again in turns.

    A short text takes a fraction of a second, in which another program may slow down
    either way. Turns end where their ratios are near each other, or after some seconds.

    Args:
        drafted: The run, which has ended.
        plain_runner: What decodes the same texts without drafts.
        is_other: Whether plain decoding draws other tokens.

    Returns:
        The fields of `Session.totals` that the turn with the median ratio changes and
        those of the comparison: `speedups` has every turn's ratio, and `identical` is
        `None` for other draws. `None` if the comparison was interrupted.
    """
    plain = drafted.again(plain_runner)
    plain.warm_up()
    began = turn_began = time.monotonic()
    turns = [(drafted, plain)]
    if not plain.decode_all():
        return None
    while _goes_on(ratios := [*map(_ratio, turns)]):
        now = time.monotonic()
        if (now - began) + (now - turn_began) > _MOST_SECONDS:
            break
        turn_began = now
        turns.append((drafted.again(), plain.again()))
        if not all(one.decode_all(has_progress=False) for one in turns[-1]):
            return None
    ours, theirs = sorted(turns, key=lambda turn: _ratio(turn) or 0)[len(turns) // 2]
    wanted = [run["generated_ids"] for run in drafted.runs]
    is_identical = all(
        [run["generated_ids"] for run in one.runs] == wanted
        for turn in turns
        for one in turn
    )
    return {
        "tokens_per_second": _speed(ours),
        "autoregressive_tokens_per_second": _speed(theirs),
        "speedup": _ratio((ours, theirs)),
        "speedups": ratios,
        "identical": None if is_other else is_identical,
    }


def _goes_on(ratios: list[float | None]) -> bool:
    """Returns whether the turns so far leave open what another could tell."""
    found = [ratio for ratio in ratios if ratio]
    # Several processes would have to agree.
    if len(found) < len(ratios) or jax.process_count() > 1:
        return False
    least, most = _TURNS
    is_near = max(found) <= _SPREAD * min(found)
    return len(found) < least or (len(found) < most and not is_near)


def _ratio(turn: tuple[Session, Session]) -> float | None:
    ours, theirs = map(_speed, turn)
    return ours / theirs if ours and theirs else None


def _speed(session: Session) -> float | None:
    return session.totals()["tokens_per_second"]
