"""A model that writes its own cache decodes the same text as with its own loop."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.adapters import CacheWritingTarget
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, growth, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.interface import Params, prefill
from eagle_jax.sampling import choose_tokens
from eagle_jax.testing import ToyModel, assert_same_tokens, path_code, path_logits
from eagle_jax.testing.programs import every_line, find_copies
from tests.helpers import texts

VOCABULARY = 8


def empty(batch: int, slots: int) -> dict[str, Any]:
    """Two kinds of arrays, whose slots are different axes."""
    codes = jnp.zeros((batch, 2, slots), jnp.uint32)
    positions = jnp.zeros((batch, slots), jnp.int32)
    cursor = jnp.zeros(batch, jnp.int32)
    return {"codes": codes, "positions": positions, "cursor": cursor}


def apply(
    params: Any, tokens: Any, positions: Any, layers: Any, mask: Any
) -> tuple[Any, Any, Any]:
    """As in Gemma: it writes where the first row's cursor stands, and stores positions.

    A path's state is a sum over the slots that are seen, as attention's is.
    """
    del params
    begin = layers["cursor"][0]
    new = jnp.stack([path_code(tokens, positions), path_code(positions, tokens)], 1)
    codes = jax.lax.dynamic_update_slice(layers["codes"], new, (0, 0, begin))
    places = jax.lax.dynamic_update_slice(layers["positions"], positions, (0, begin))
    mixed = codes[:, 0] ^ (codes[:, 1] * places.astype(jnp.uint32))
    seen = jnp.where(mask, mixed[:, None], jnp.uint32(0))
    state = seen.sum(axis=2, dtype=jnp.uint32)[..., None]
    cursor = layers["cursor"] + tokens.shape[1]
    return state, state, {"codes": codes, "positions": places, "cursor": cursor}


def project(params: Any, hidden: jax.Array) -> jax.Array:
    assert hidden.ndim == 3
    sharpness = params["sharpness"]
    state = hidden[..., 0]
    return path_logits(state, vocab_size=VOCABULARY, sharpness=sharpness, seed=0)


TARGET = CacheWritingTarget(apply=apply, project=project, empty=empty, tail=10)
WEIGHTS = {"sharpness": jnp.float32(2.0)}
DRAFTER = TreeDrafter(
    model=ToyModel(vocab_size=VOCABULARY),
    tree=TreeConfig(num_nodes=8, depth=3, width=2),
)
PARAMS = Params(target=WEIGHTS, drafter=jnp.float32(0.7))


def requests(*lengths: int, new_tokens: int = 24) -> Requests:
    rng = np.random.default_rng(0)
    return make_requests(
        [rng.integers(VOCABULARY, size=length).tolist() for length in lengths],
        max_new_tokens=new_tokens,
        temperature=[float(row % 2) for row in range(len(lengths))],
        seeds=list(range(len(lengths))),
    )


@functools.partial(jax.jit, donate_argnames=("layers",))
def own_step(
    one: Requests, token: jax.Array, position: jax.Array, layers: Any
) -> tuple[jax.Array, Any]:
    """One token of the model's own loop, where the cursor is at the text's end."""
    mask = jnp.arange(layers["positions"].shape[1]) <= position
    arguments = (token[None, None], position[None, None], layers, mask[None, None])
    hidden, _, layers = apply(WEIGHTS, *arguments)
    logits = project(WEIGHTS, hidden)[:, 0]
    settings = (one.sampling, one.keys, logits, position[None] + 1)
    return choose_tokens(*settings, greedy=False)[0], layers


def own_text(asked: Requests, row: int) -> list[int]:
    one = jax.tree.map(lambda leaf: leaf[row : row + 1], asked)
    text = one.prompts[0, : one.prompt_lengths[0]].tolist()
    layers = empty(1, 192)
    for position in range(len(text) + int(one.max_new_tokens[0]) - 1):
        token, place = jnp.int32(text[position]), jnp.int32(position)
        chosen, layers = own_step(one, token, place, layers)
        if position + 1 == len(text):
            text = [*text, int(chosen)]
    return text


def assert_own_texts(asked: Requests, state: Any) -> None:
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    for row, length in enumerate(lengths):
        expected = own_text(asked, row)
        assert_same_tokens(tokens[row : row + 1, :length], [expected])


@pytest.mark.parametrize("tail", [1, 64])
def test_rows_of_any_length_have_the_texts_of_the_models_own_loop(tail: int) -> None:
    asked = requests(1, 5, 20, 2)
    target = dataclasses.replace(TARGET, tail=tail)
    decoder = Decoder(target=target, drafter=DRAFTER)
    state = speculative.generate(decoder, PARAMS, asked)
    assert_own_texts(asked, state)
    assert state.accept_lengths.sum() > 0
    plain = autoregressive.generate(decoder, PARAMS, asked)
    assert_same_tokens(texts(asked, state), texts(asked, plain))


def test_prompts_read_in_chunks_and_growing_caches_leave_the_texts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = requests(20, 3, new_tokens=130)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(growth, "FIRST_LENGTH", 48)
    assert growth.cache_sizes(asked, None, depth=DRAFTER.depth) == [64, 192]
    decoder = Decoder(target=TARGET, drafter=DRAFTER)
    assert_own_texts(asked, speculative.generate(decoder, PARAMS, asked))


def ring(batch: int, slots: int, *, window: int) -> dict[str, Any]:
    codes = jnp.zeros((batch, 2, min(slots, window)), jnp.uint32)
    return empty(batch, slots) | {"codes": codes}


def narrowed(*arguments: Any) -> tuple[Any, Any, Any]:
    hidden, features, layers = apply(*arguments)
    return hidden, features, layers | {"codes": layers["codes"].astype(jnp.uint8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"empty": functools.partial(ring, window=4)},
            r"uint32\(1, 2, 4\) for \['codes'\], which has neither",
        ),
        (
            {"empty": functools.partial(ring, window=40)},
            r"uint32\(1, 2, 40\) for \['codes'\], which has neither",
        ),
        ({"apply": narrowed}, "`apply` .* returns codes of shape .* uint8"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str
) -> None:
    target = dataclasses.replace(TARGET, **change)
    decoder = Decoder(target=target, acceptance="coupled")
    with pytest.raises(InputError, match=message):
        autoregressive.generate(decoder, PARAMS, requests(3))


@pytest.mark.usefixtures("optimised")
def test_no_round_copies_a_cache() -> None:
    tree = TreeConfig(num_nodes=4, depth=2, width=2)
    drafter = dataclasses.replace(DRAFTER, tree=tree)
    decoder, asked = Decoder(target=TARGET, drafter=drafter), requests(3, 4)
    begin = functools.partial(speculative.prefill, decoder, num_slots=192)
    state: Any = jax.eval_shape(begin, PARAMS, asked)
    compiled: Any = speculative.decode.lower(decoder, PARAMS, state).compile()
    for leaf in jax.tree.leaves(state.target_cache.layers):
        if len(leaf.shape) > 1:  # No cursor.
            assert find_copies(every_line(compiled.as_text()), leaf.shape) == []
