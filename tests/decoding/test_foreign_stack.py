"""A target of somebody else, written against the public protocols alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.interface import Params, TargetOutput
from eagle_jax.testing import (
    ToyDrafter,
    ToyTarget,
    assert_same_tokens,
    path_code,
    path_logits,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A cache unlike ours: raw tokens, the newest entries at the front."""

    tokens: jax.Array
    length: jax.Array


jax.tree_util.register_dataclass(
    Ledger, data_fields=["tokens", "length"], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class LedgerTarget:
    """The toy's text from another cache layout: `[B, S]`, the last token in slot 0."""

    vocab_size: int = 8

    def init_cache(self, batch: int, capacity: int) -> Ledger:
        shape = (batch, capacity)
        return Ledger(
            tokens=jnp.zeros(shape, jnp.int32), length=jnp.zeros(batch, jnp.int32)
        )

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: Ledger,
    ) -> TargetOutput:
        num_tokens = tokens.shape[1]
        slots, length = jnp.arange(cache.tokens.shape[1]), cache.length[:, None]
        codes = path_code(cache.tokens, length - 1 - slots)
        past = jnp.where(slots < length, codes, jnp.uint32(0))
        if mask is None:
            mask = jnp.tri(num_tokens, dtype=bool)[None]
        new = jnp.where(mask, path_code(tokens, positions)[:, None], jnp.uint32(0))
        state = past.sum(1, keepdims=True, dtype=jnp.uint32)
        state = state + new.sum(2, dtype=jnp.uint32)
        hidden = jnp.stack([state, state], axis=-1)  # Wider than its features.
        return TargetOutput(
            hidden=hidden, features=state[..., None], entries={"ids": tokens}
        )

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        state = hidden[..., 1]
        return path_logits(
            state, vocab_size=self.vocab_size, sharpness=params["sharpness"], seed=0
        )

    def commit(
        self, cache: Ledger, entries: Any, path: jax.Array, count: jax.Array
    ) -> Ledger:
        """Pushes one token after the other onto the front."""
        tokens = cache.tokens
        accepted = jnp.take_along_axis(entries["ids"], path, axis=1)
        for step in range(path.shape[1]):
            pushed = jnp.roll(tokens, 1, axis=1).at[:, 0].set(accepted[:, step])
            tokens = jnp.where(step < count[:, None], pushed, tokens)
        return Ledger(tokens=tokens, length=cache.length + count)


def test_another_cache_layout_runs_through_the_loop_unchanged() -> None:
    toy, foreign = ToyTarget(), LedgerTarget()
    drafter = ToyDrafter(target=toy, tree=TreeConfig(num_nodes=10, depth=3, width=3))
    foreign_params = {"sharpness": jnp.float32(2.0)}
    requests = make_requests(
        [[1, 2, 3], [4], [5, 6, 7, 0, 1]],
        max_new_tokens=[30, 9, 30],
        temperature=[0.0, 1.0, 1.0],
        seeds=[0, 1, 2],
    )
    expected = autoregressive.generate(
        Decoder(target=toy, acceptance="coupled"), Params(target=()), requests
    )
    plain = autoregressive.generate(
        Decoder(target=foreign, acceptance="coupled"),
        Params(target=foreign_params),
        requests,
    )
    state = speculative.generate(
        Decoder(target=foreign, drafter=drafter, acceptance="coupled"),
        Params(target=foreign_params, drafter=jnp.float32(0.7)),
        requests,
    )
    for texts in (plain, state):
        rows = [
            np.asarray(texts.tokens)[row, :length]
            for row, length in enumerate(np.asarray(texts.lengths))
        ]
        wanted = [
            np.asarray(expected.tokens)[row, :length]
            for row, length in enumerate(np.asarray(expected.lengths))
        ]
        assert_same_tokens(rows, wanted)
    assert state.accept_lengths.sum() > 0
