"""Requests are checked before anything is compiled."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.decoding.requests import cache_slots, make_requests
from eagle_jax.errors import InputError
from tests.helpers import refused


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"max_new_tokens": [3, -1]}, "max_new_tokens = -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": 2**31 - 1}, "longer than any cache"),
        ({"max_new_tokens": [1, 2, 3]}, "3 values for 2 prompts"),
        ({"max_length": 2}, "prompt 0 has 3 tokens"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0 must"),
        ({"top_p": 1.01}, "top_p = 1.01"),
        ({"top_p": [1.0, 1e-40]}, "top_p = 1e-40"),
        ({"temperature": 1e39}, "temperature = 1e\\+39 must be at most 3.4e38"),
        ({"top_k": -2}, "top_k = -2"),
        ({"min_p": -0.01}, "min_p = -0.01 must be 0"),
        ({"min_p": 1.01}, "min_p = 1.01"),
        ({"seeds": -1}, "seeds = -1"),
        ({"prompt_bucket": 2}, "prompt_bucket = 2"),
        ({"stop_tokens": "2"}, "stop_tokens = 2 must be int32"),
        ({"stop_tokens": [2**31]}, "must be int32"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        defaults: dict[str, Any] = {"max_new_tokens": 5}
        make_requests([[1, 2, 3], [4]], **(defaults | settings))


@pytest.mark.parametrize(
    "prompts, named", [([], "no prompts"), ([[1], []], "prompt 1")]
)
def test_prompts_without_tokens_are_named(prompts: list[list[int]], named: str) -> None:
    refused(lambda: make_requests(prompts, max_new_tokens=5), named)


@pytest.mark.parametrize(
    "wrong", [-1, 300, 10**6, 2**31, 10**12, 1.5, 2.0, "3", None, [4]], ids=str
)
def test_what_is_no_id_of_the_target_is_named(wrong: Any) -> None:
    prompts = [[1, 2], [299, wrong, -7]]
    refused(
        lambda: make_requests(prompts, max_new_tokens=5, vocab_size=300),
        "prompt 1 has the id ",
        f"{wrong!r}; ids are whole numbers of 0 to 299",
    )
    if wrong not in (300, 10**6):
        refused(
            lambda: make_requests(prompts, max_new_tokens=5), "prompt 1 has the id "
        )


def test_prompts_may_be_arrays() -> None:
    prompts: Any = [np.array([1, 2], np.int64), jnp.array([1, 2])]
    requests = make_requests(prompts, max_new_tokens=5, vocab_size=3)
    assert requests.prompts[:, :2].tolist() == [[1, 2]] * 2


def test_one_stop_token_may_be_given_alone() -> None:
    alone, listed = (
        make_requests([[1]], max_new_tokens=5, stop_tokens=tokens)
        for tokens in (2, [2])
    )
    assert alone.stop_tokens.tolist() == listed.stop_tokens.tolist()


def test_a_huge_limit_ends_at_the_cache() -> None:
    requests = make_requests([[1]], max_new_tokens=2**31 - 1, max_length=20)
    assert requests.max_length.tolist() == [20]


def test_nearby_requests_share_their_shapes() -> None:
    short = make_requests([[1] * 3], max_new_tokens=20, stop_tokens=[1])
    long = make_requests([[1] * 16], max_new_tokens=40, stop_tokens=[1, 2, 3])
    assert [np.shape(x) for x in (short.prompts, short.stop_tokens)] == [
        np.shape(x) for x in (long.prompts, long.stop_tokens)
    ]
    assert cache_slots(short, depth=6) == cache_slots(long, depth=6) == 64
