# What breaks the protocols is the subject here, so types may not forbid it.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
"""Mistakes that adapters of other stacks make are found, and named."""

import dataclasses
import re
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
WINDOWED = tiny.target_config(sliding_window=4, windowed_layers=(1,))


def with_length(cache: Any, length: jax.Array) -> Any:
    return dataclasses.replace(cache, length=length)


class Mutant(ToyTarget):
    """A right target, whose methods change what they are given before they read it."""

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> Any:
        given = self.misread(tokens, positions, mask, cache)
        return super().forward(params, tokens, *given)

    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        return positions, mask, cache


class OwnPositions(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        return cache.length[:, None] + jnp.arange(tokens.shape[1]), mask, cache


class NoMask(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        return positions, None, cache


class Blind(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        if mask is not None:
            mask = mask & ~jnp.eye(tokens.shape[1], dtype=bool)
        return positions, mask, cache


class BlindWithoutMask(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        if mask is None:
            mask = jnp.tri(tokens.shape[1], k=-1, dtype=bool)[None]
        return positions, mask, cache


class NotCausal(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        return positions, jnp.ones((1, *tokens.shape[1:] * 2), bool), cache


class OneSlotTooMany(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        return positions, mask, with_length(cache, cache.length + 1)


class NoneWithoutCache(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        if mask is None:
            cache = with_length(cache, 0 * cache.length)
        return positions, mask, cache


class ChunksWithoutCache(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        if mask is None and tokens.shape[1] > 1:
            cache = with_length(cache, 0 * cache.length)
        return positions, mask, cache


class RowZeroIsRead(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        length = jnp.broadcast_to(cache.length[0], cache.length.shape)
        return positions, mask, with_length(cache, length)


class OtherFeatures(Mutant):
    def forward(self, *arguments: Any) -> Any:
        output = super().forward(*arguments)
        return dataclasses.replace(output, features=output.features[:, ::-1])


class WrittenInPlace(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        object.__setattr__(cache, "codes", cache.codes + jnp.uint32(0))
        return positions, mask, cache


class NoPath(ToyTarget):
    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        path = jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape)
        return super().commit(cache, entries, path, count)


class AlwaysP(ToyTarget):
    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        return super().commit(cache, entries, path, 0 * count + path.shape[1])


class RowZeroIsWritten(ToyTarget):
    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        first = jnp.broadcast_to(cache.length[0], cache.length.shape)
        new = super().commit(with_length(cache, first), entries, path, count)
        return with_length(new, cache.length + count)


class RowZerosPath(ToyTarget):
    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        path = jnp.broadcast_to(path[0], path.shape)
        return super().commit(cache, entries, path, count)


class NewestInFront(ToyTarget):
    """Its slots are moved by what it is told to be the capacity."""

    def init_cache(self, batch: int, capacity: int) -> ToyCache:
        cache = super().init_cache(batch, capacity)
        return dataclasses.replace(cache, codes=cache.codes + jnp.uint32(capacity))

    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        codes = cache.codes[:, ::-1]
        new = super().commit(
            dataclasses.replace(cache, codes=codes), entries, path, count
        )
        return dataclasses.replace(new, codes=new.codes[:, ::-1])

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> Any:
        cache = dataclasses.replace(cache, codes=cache.codes[:, ::-1])
        return super().forward(params, tokens, positions, mask, cache)


class OldAndNewAlive(ToyTarget):
    """Writes the nodes into the cache to read them, and the path into the old one."""

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> Any:
        output = super().forward(params, tokens, positions, mask, cache)
        # Behind a long text there are no slots for the nodes of a large tree.
        if not 0 < cache.codes.shape[1] < 64:
            return output

        def write(row: jax.Array, codes: jax.Array) -> jax.Array:
            window = output.entries[row][None]
            return jax.lax.dynamic_update_slice(codes, window, (row, cache.length[row]))

        written = jax.lax.fori_loop(0, len(tokens), write, cache.codes)
        return dataclasses.replace(output, entries=(written, cache.length))

    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        if isinstance(entries, tuple):
            written, length = entries
            entries = jnp.take_along_axis(written, length[:, None] + path, axis=1)
            path = jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape)
        return super().commit(cache, entries, path, count)


class SlotsFirst(ToyTarget):
    def init_cache(self, batch: int, capacity: int) -> ToyCache:
        cache = super().init_cache(batch, capacity)
        return dataclasses.replace(cache, codes=cache.codes.T)


class MixedRows(ToyTarget):
    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        return super().unembed(params, hidden[::-1] if hidden.ndim == 2 else hidden)


class Scaled(ToyTarget):
    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        logits = super().unembed(params, hidden)
        return 0.5 * logits if hidden.ndim == 2 else logits


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


class FewSlots(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        return positions, mask, dataclasses.replace(cache, codes=cache.codes[:, :32])


class FewRowsOfTheMask(Mutant):
    def misread(self, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
        if mask is not None:
            rows = jnp.arange(tokens.shape[1])
            mask = mask | ((rows >= 16)[:, None] & (rows <= rows[:, None]))
        return positions, mask, cache


class FewRowsAreWritten(ToyTarget):
    def commit(self, cache: Any, entries: Any, path: Any, count: Any) -> Any:
        new = super().commit(cache, entries, path[:, :6], jnp.minimum(count, 6))
        return with_length(new, cache.length + count)


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


class ByIdentity(ToyTarget):
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize(
    ("mutant", "named"),
    [
        (OwnPositions, "forward with a tree's mask .*ignores the positions"),
        (NoMask, "forward with a tree's mask .*: node 2 sees its sibling 1"),
        (Blind, "forward with a tree's mask .*node 0 is blind to itself"),
        (BlindWithoutMask, "forward with mask None .*blind to itself"),
        (NotCausal, "forward with mask None .*a token after it"),
        (OneSlotTooMany, "slots behind a row's text are seen"),
        (NoneWithoutCache, "mask None and a filled cache: it ignores the cache"),
        (ChunksWithoutCache, "mask None and a filled cache: it ignores the cache"),
        (RowZeroIsRead, "row 0's length"),
        (OtherFeatures, "forward .*the features"),
        (WrittenInPlace, "forward writes into the cache"),
        (NoPath, "commit ignores the path"),
        (AlwaysP, "commit must add `count`"),
        (RowZeroIsWritten, "commit takes row 0's length or row 0's path"),
        (RowZerosPath, "commit takes row 0's length or row 0's path"),
        (NewestInFront, "init_cache: a larger cache"),
        (SlotsFirst, r"init_cache .axis 0 is the batch. returns codes of shape"),
        (OldAndNewAlive, r"commit: a round copies all of the cache's .codes \[3,37\]"),
        (ByIdentity, "a copy of ByIdentity is not equal"),
        (
            MixedRows,
            r"unembed: the logits of hidden states \[B, E\] .* mixes up the rows",
        ),
        (Scaled, r"unembed: the logits of hidden states \[B, E\] .* scales"),
        (WindowOfTheRoot, "a window .* each node's own position, not from"),
        (FewSlots, "a text of 167 tokens is not read whole"),
        (FewRowsOfTheMask, "it ignores the mask: node 16 sees node"),
        (FewRowsAreWritten, "commit does not write all of `count` rows, here 12"),
        (SpoiledByPadding, "a node of padding, .* spoils node 0"),
    ],
)
def test_a_mistake_of_an_adapter_is_found_and_named(mutant: Any, named: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_valid_target(mutant(vocab_size=8), (), 8)
    message = str(caught.value)
    assert re.search(named, message), message
    assert message.count(mutant.__name__) >= 1


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
