"""Where stop strings end a text, token by token."""

from typing import Any

import numpy as np
import pytest

from eagle_jax.decoding.state import StopReason
from eagle_jax.engine.needs import BatchNeeds
from eagle_jax.engine.request import Request
from eagle_jax.engine.text import News, Text

_BOS, _EOS = 298, 299


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """One per character."""
    return [tokenizer.convert_tokens_to_ids(one) for one in text]


def text_of(tokenizer: Any, **settings: Any) -> Text:
    """One that begins after `<s>`."""
    request = Request(**settings)
    return Text([_BOS], request, needs=BatchNeeds(), tokenizer=tokenizer)


def news_of(ids: list[int], reason: StopReason) -> News:
    """A batch of one row that holds `<s>` and these."""
    return News(
        tokens=np.array([[_BOS, *ids]]),
        lengths=np.array([1 + len(ids)]),
        stop_reason=np.array([reason]),
        accept_lengths=np.zeros((1, 0), np.int32),
        num_rounds=np.zeros(1, np.int32),
        expected=np.zeros((1, 2)),
        logprobs=None,
    )


def end_of(
    tokenizer: Any, ids: list[int], step: int = 1, **settings: Any
) -> tuple[str, int | None]:
    """The text, and the tokens up to the one that completed a stop string."""
    text = text_of(tokenizer, **settings)
    for count in [*range(step, len(ids), step), len(ids)]:
        is_last = count == len(ids)
        reason = StopReason.MAX_TOKENS if is_last else StopReason.RUNNING
        text.take(news_of(ids[:count], reason), 0)
        if text.stop_reason == StopReason.STOP_STRING:
            return text.text, len(text.token_ids)
    return text.text, None


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize(
    ("least", "stop", "text", "count"),
    [
        (0, "ab", "", 2),
        (1, "ab", "", 2),
        # As in vLLM: what the first tokens complete is no end, and stays in the text.
        (2, "ab", "abx", 5),
        (4, "ab", "abx", 5),
        (5, "ab", "abxabyyy", 10),
        (10, "ab", "abxabyyyab", None),
        # Another string does not make one be found that was complete before.
        (2, ["ab", "never there"], "abx", 5),
        (2, ["bx", "never there"], "a", 3),
    ],
)
def test_up_to_min_new_tokens_no_stop_string_ends_a_text(
    tokenizer: Any, step: int, least: int, stop: Any, text: str, count: int | None
) -> None:
    ids = ids_of(tokenizer, "abxabyyyab")
    found = end_of(tokenizer, ids, step, stop=stop, min_new_tokens=least)
    assert found == (text, count)


def test_special_tokens_among_stop_strings_are_stop_tokens(tokenizer: Any) -> None:
    bos, eos = tokenizer.convert_ids_to_tokens([_BOS, _EOS])
    asked = Request(stop=["ab", bos, eos + "x"], stop_token_ids=[5])
    assert sorted(asked.stops(tokenizer, [_EOS])) == [5, _BOS, _EOS]
    ignoring = Request(stop=["ab", bos], ignore_eos=True)
    assert ignoring.stops(tokenizer, [_EOS]) == [_BOS]
    # Where texts are written with them, the string is in the text.
    written = Request(stop=bos, skip_special_tokens=False)
    assert written.stops(tokenizer, [_EOS]) == [_EOS]
    ids = [*ids_of(tokenizer, "ab"), _BOS]
    assert end_of(tokenizer, ids, stop=bos, skip_special_tokens=False) == ("ab", 3)
    assert Request(stop=bos).stops(None, ()) == []


@pytest.mark.parametrize("skips", [True, False])
def test_a_special_token_that_ended_the_text_can_stay_in_it(
    tokenizer: Any, skips: bool
) -> None:
    bos = tokenizer.convert_ids_to_tokens(_BOS)
    for last, kept in ((_BOS, bos), (_EOS, "" if skips else "</s>")):
        text = text_of(
            tokenizer,
            stop=["ab", bos],
            include_stop_str_in_output=True,
            skip_special_tokens=skips,
        )
        ids = [*ids_of(tokenizer, "a"), last]
        text.take(news_of(ids, StopReason.STOP_TOKEN), 0)
        assert text.token_ids == ids
        assert text.text == text.piece().text == "a" + kept
