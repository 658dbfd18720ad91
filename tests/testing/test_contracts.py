# What breaks the protocols is the subject here, so types may not forbid it.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
"""Mistakes that adapters of other stacks make are found, and named."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.interface import TargetOutput
from eagle_jax.models.transformer import Transformer
from eagle_jax.testing import ToyTarget, assert_valid_target
from eagle_jax.testing.toys import ToyCache, path_code
from tests import tiny

TOY = ToyTarget(vocab_size=8)
WINDOWED = tiny.target_config(num_layers=2, sliding_window=4, windowed_layers=(1,))


def with_length(cache: Any, length: jax.Array) -> Any:
    return dataclasses.replace(cache, length=length)


def misread(change: Callable[..., Any]) -> dict[str, Any]:
    """A right target that changes positions, mask and cache before it reads them."""

    def forward(self: Any, params: Any, tokens: Any, *given: Any) -> Any:
        return ToyTarget.forward(self, params, tokens, *change(tokens, *given))

    return {"forward": forward}


def masked(change: Callable[[Any, Any], Any]) -> dict[str, Any]:
    return misread(lambda tokens, p, mask, cache: (p, change(tokens, mask), cache))


def miswritten(
    change: Callable[..., Any], after: Callable[..., Any] = lambda new, right: new
) -> dict[str, Any]:
    """A right target that changes what it commits, and the cache after that."""

    def commit(self: Any, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        new = ToyTarget.commit(self, *change(cache, entries, path, count))
        return after(new, cache.length + count)

    return {"commit": commit}


def misembedded(change: Callable[[Any], Any]) -> dict[str, Any]:
    """A right target, but for the logits of hidden states without an axis of tokens."""

    def unembed(self: Any, params: Any, hidden: jax.Array) -> Any:
        logits = ToyTarget.unembed(self, params, hidden)
        return change(logits) if hidden.ndim == 2 else logits

    return {"unembed": unembed}


def first(length: jax.Array) -> jax.Array:
    return jnp.broadcast_to(length[0], length.shape)


def none_without_cache(tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
    if mask is None:
        cache = with_length(cache, 0 * cache.length)
    return positions, mask, cache


def chunks_without_cache(tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
    if mask is None and tokens.shape[1] > 1:
        cache = with_length(cache, 0 * cache.length)
    return positions, mask, cache


def written_in_place(tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
    object.__setattr__(cache, "codes", cache.codes + jnp.uint32(0))
    return positions, mask, cache


def few_rows(tokens: Any, mask: Any) -> Any:
    rows = jnp.arange(tokens.shape[1])
    more = (rows >= 16)[:, None] & (rows <= rows[:, None])
    return None if mask is None else mask | more


def with_other_features(self: Any, *arguments: Any) -> Any:
    output = ToyTarget.forward(self, *arguments)
    return dataclasses.replace(output, features=output.features[:, ::-1])


def with_slots_first(self: Any, batch: int, capacity: int) -> ToyCache:
    cache = ToyTarget.init_cache(self, batch, capacity)
    return dataclasses.replace(cache, codes=cache.codes.T)


class NewestInFront(ToyTarget):
    """Its slots are moved by what it is told to be the capacity."""

    def init_cache(self, batch: int, capacity: int) -> ToyCache:
        cache = super().init_cache(batch, capacity)
        return dataclasses.replace(cache, codes=cache.codes + jnp.uint32(capacity))

    def turned(self, cache: Any) -> Any:
        return dataclasses.replace(cache, codes=cache.codes[:, ::-1])

    def commit(self, cache: Any, *given: Any) -> Any:
        return self.turned(super().commit(self.turned(cache), *given))

    def forward(self, *given: Any) -> Any:
        params, tokens, positions, mask, cache = given
        return super().forward(params, tokens, positions, mask, self.turned(cache))


class OldAndNewAlive(ToyTarget):
    """Writes the nodes into the cache to read them, and the path into the old one."""

    def forward(self, *given: Any) -> Any:
        output, tokens, cache = super().forward(*given), given[1], given[-1]
        # Behind a long text there are no slots for the nodes of a large tree.
        if not 0 < cache.codes.shape[1] < 64:
            return output

        def write(row: jax.Array, codes: jax.Array) -> jax.Array:
            window = output.entries[row][None]
            return jax.lax.dynamic_update_slice(
                codes, window, (jnp.int32(row), cache.length[row])
            )

        written = jax.lax.fori_loop(0, len(tokens), write, cache.codes)
        return dataclasses.replace(output, entries=(written, cache.length))

    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        if isinstance(entries, tuple):
            written, length = entries
            entries = jnp.take_along_axis(written, length[:, None] + path, axis=1)
            path = jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape)
        return super().commit(cache, entries, path, count)


class Windowed(ToyTarget):
    """A token sees itself and the 23 before it."""

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> Any:
        if mask is None:
            mask = jnp.tri(tokens.shape[1], dtype=bool)[None]
        distances = positions[:, :, None] - positions[:, None, :]
        codes = path_code(tokens, positions)
        seen = jnp.where(mask & (distances < 24), codes[:, None, :], jnp.uint32(0))
        slots = jnp.arange(cache.codes.shape[1])
        is_seen = (slots < cache.length[:, None])[:, None] & (
            slots > self.newest(positions)[..., None] - 24
        )
        past = jnp.where(is_seen, cache.codes[:, None], jnp.uint32(0))
        state = (seen.sum(2, jnp.uint32) + past.sum(2, jnp.uint32))[..., None]
        return TargetOutput(hidden=state, features=state, entries=codes)

    def newest(self, positions: jax.Array) -> jax.Array:
        return positions


class WindowOfTheRoot(Windowed):
    def newest(self, positions: jax.Array) -> jax.Array:
        return jnp.broadcast_to(positions[:, :1], positions.shape)


class SpoiledByPadding(ToyTarget):
    """Its logits are NaN where a token sees no root, and as values 0 x NaN is NaN."""

    def forward(self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any):
        output = super().forward(params, tokens, positions, mask, cache)
        state = output.hidden
        is_spoiled = jnp.zeros_like(state)
        if mask is not None:
            is_spoiled += (~mask[:, :, 0]).any(axis=1)[:, None, None]
        return dataclasses.replace(
            output, hidden=jnp.concatenate([state, is_spoiled], axis=2)
        )

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        logits = super().unembed(params, hidden)
        return jnp.where(hidden[..., 1:] > 0, jnp.nan, logits)


MISTAKES: list[tuple[Any, str]] = [
    (
        misread(lambda t, p, m, c: (c.length[:, None] + jnp.arange(t.shape[1]), m, c)),
        "forward with a tree's mask .*ignores the positions",
    ),
    (
        masked(lambda tokens, mask: None),
        "forward with a tree's mask .*: node 2 sees its sibling 1",
    ),
    (
        masked(lambda t, m: m if m is None else m & ~jnp.eye(t.shape[1], dtype=bool)),
        "forward with a tree's mask .*node 0 is blind to itself",
    ),
    (
        masked(lambda t, m: jnp.tri(t.shape[1], k=-1, dtype=bool) if m is None else m),
        "forward with mask None .*blind to itself",
    ),
    (
        masked(lambda tokens, mask: jnp.ones((1, *tokens.shape[1:] * 2), bool)),
        "forward with mask None .*a token after it",
    ),
    (
        misread(lambda t, p, m, c: (p, m, with_length(c, c.length + 1))),
        "slots behind a row's text are seen",
    ),
    (
        misread(none_without_cache),
        "mask None and a filled cache: it ignores the cache",
    ),
    (
        misread(chunks_without_cache),
        "mask None and a filled cache: it ignores the cache",
    ),
    (
        misread(lambda t, p, m, c: (p, m, with_length(c, first(c.length)))),
        "row 0's length",
    ),
    ({"forward": with_other_features}, "forward .*the features"),
    (misread(written_in_place), "forward writes into the cache"),
    (
        miswritten(lambda c, e, p, n: (c, e, 0 * p + jnp.arange(p.shape[1]), n)),
        "commit ignores the path",
    ),
    (
        miswritten(lambda c, e, p, n: (c, e, p, 0 * n + p.shape[1])),
        "commit must add `count`",
    ),
    (
        miswritten(
            lambda c, e, p, n: (with_length(c, first(c.length)), e, p, n), with_length
        ),
        "commit takes row 0's length or row 0's path",
    ),
    (
        miswritten(lambda c, e, p, n: (c, e, jnp.broadcast_to(p[0], p.shape), n)),
        "commit takes row 0's length or row 0's path",
    ),
    (NewestInFront, "init_cache: a larger cache"),
    (
        {"init_cache": with_slots_first},
        r"init_cache .axis 0 is the batch. returns codes of shape",
    ),
    (OldAndNewAlive, r"commit: a round copies all of the cache's .codes \[3,37\]"),
    (
        {"__eq__": lambda self, other: self is other, "__hash__": lambda self: 1},
        "a copy of Mutant is not equal",
    ),
    (
        misembedded(lambda logits: logits[::-1]),
        r"unembed: the logits of hidden states \[B, E\] .* mixes up the rows",
    ),
    (
        misembedded(lambda logits: 0.5 * logits),
        r"unembed: the logits of hidden states \[B, E\] .* scales",
    ),
    (WindowOfTheRoot, "a window .* each node's own position, not from"),
    (
        misread(
            lambda t, p, m, c: (p, m, dataclasses.replace(c, codes=c.codes[:, :32]))
        ),
        "a text of 167 tokens is not read whole",
    ),
    (masked(few_rows), "it ignores the mask: node 16 sees node"),
    (
        miswritten(lambda c, e, p, n: (c, e, p[:, :6], jnp.minimum(n, 6)), with_length),
        "commit does not write all of `count` rows, here 12",
    ),
    (SpoiledByPadding, "a node of padding, .* spoils node 0"),
]


@pytest.mark.parametrize(("mistake", "named"), MISTAKES)
def test_a_mistake_of_an_adapter_is_found_and_named(mistake: Any, named: str) -> None:
    if isinstance(mistake, dict):
        mistake = type("Mutant", (ToyTarget,), mistake)
    with pytest.raises(AssertionError) as caught:
        assert_valid_target(mistake(vocab_size=8), (), 8)
    message = str(caught.value)
    assert re.search(named, message), message
    assert mistake.__name__ in message


@pytest.mark.parametrize(
    ("target", "params", "vocab_size"),
    [
        (TOY, (), 8),
        (ToyTarget(vocab_size=3), (), 3),
        (Windowed(vocab_size=8), (), 8),
        (Transformer(config=WINDOWED), tiny.target_params(WINDOWED), 64),
    ],
    ids=["toy", "three tokens", "toy with a window", "windows"],
)
def test_right_targets_pass(target: Any, params: Any, vocab_size: int) -> None:
    assert_valid_target(target, params, vocab_size)


class FewPlaces(ToyTarget):
    """As a table of positions that fills with NaN what lies behind its end."""

    def forward(self, params: Any, tokens: Any, positions: Any, *others: Any) -> Any:
        output = super().forward(params, tokens, positions, *others)
        is_beyond = jnp.broadcast_to((positions >= 64).any(), positions.shape)
        hidden = jnp.stack([output.hidden[..., 0], is_beyond.astype(jnp.uint32)], -1)
        return dataclasses.replace(output, hidden=hidden)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        return jnp.where(hidden[..., 1:] > 0, jnp.nan, super().unembed(params, hidden))


def test_a_model_of_few_positions_passes_if_they_are_given() -> None:
    target = FewPlaces(vocab_size=8)
    assert_valid_target(target, (), 8, num_positions=64)
    with pytest.raises(AssertionError, match=r"192 tokens; give `num_positions`"):
        assert_valid_target(target, (), 8)


def test_another_number_of_tokens_is_named() -> None:
    with pytest.raises(AssertionError, match=r"unembed returns 8 logits .* is 9"):
        assert_valid_target(TOY, (), 9)
