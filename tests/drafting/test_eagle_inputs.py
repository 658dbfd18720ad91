"""Heads that read something else than EAGLE's (EAGLE-1, section 4.3.2)."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.drafting.eagle import eagle_model
from eagle_jax.interface import Params
from eagle_jax.models import cache as kv
from eagle_jax.models import eagle_head
from eagle_jax.models.eagle_head import HeadInputs
from eagle_jax.models.transformer import Transformer, causal_mask, unembed
from eagle_jax.testing import assert_same_tokens
from eagle_jax.tree import chain, from_paths
from tests import tiny
from tests.helpers import make_draws, texts

pytestmark = pytest.mark.usefixtures("quick_compilation")

TARGET = Transformer(config=tiny.TARGET)
INPUTS = get_args(HeadInputs)
PROMPT, ROOT, DEPTH = [3, 1, 4, 1, 5], 9, 3


def drafted(inputs: HeadInputs, features: jax.Array, params: Params) -> list[int]:
    """The chain of most likely tokens, from one call over all pairs per token."""
    config = tiny.head_config(inputs=inputs)
    tokens, known, found = [*PROMPT, ROOT], features, []
    target, head = params.target, params.drafter.head
    for _ in range(DEPTH):
        count = known.shape[1]
        paired = tokens[:-1] if inputs == "feature+token" else tokens[1:]
        cache = kv.init_cache(
            num_layers=1,
            batch=1,
            num_kv_heads=config.layer.num_kv_heads,
            capacity=0,
            head_dim=config.layer.head_dim,
            dtype=jnp.dtype("float32"),
        )
        outputs, _ = eagle_head.forward(
            head,
            config,
            target.embedding[jnp.array([paired])],
            known,
            jnp.arange(count)[None],
            causal_mask(1, count),
            cache,
        )
        table = target.output_head
        found.append(int(jnp.argmax(unembed(table, outputs[0, -1]))))
        tokens.append(found[-1])
        known = jnp.concatenate([known, outputs[:, -1:]], axis=1)
    return found


def params_of(inputs: HeadInputs) -> Params:
    weights, config = tiny.target_params(), tiny.head_config(inputs=inputs)
    return Params(target=weights, drafter=tiny.head_params(config, weights))


@pytest.mark.parametrize("inputs", INPUTS)
def test_a_chain_is_that_of_one_call_over_all_pairs(inputs: HeadInputs) -> None:
    params = params_of(inputs)
    features = jax.random.normal(jax.random.key(5), (1, len(PROMPT), 32))
    model = eagle_model(tiny.head_config(inputs=inputs), "float32")
    drafter = TreeDrafter(model=model, tree=chain(DEPTH))
    state = drafter.init_state(1, 16)
    prompt, lengths = jnp.array([PROMPT]), jnp.array([len(PROMPT)])
    state = drafter.prefill(params.drafter, state, prompt, features, lengths)
    tree, _ = drafter.propose(params.drafter, state, jnp.array([ROOT]), make_draws(1))
    assert tree.tokens[0, 1:].tolist() == drafted(inputs, features, params)


@pytest.mark.parametrize("inputs", INPUTS[1:])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_plain_decodings(inputs: HeadInputs, temperature: float) -> None:
    params, rule = params_of(inputs), "coupled" if temperature else "greedy"
    drafter = TreeDrafter(
        model=eagle_model(tiny.head_config(inputs=inputs), "float32"),
        tree=from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]),
    )
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance=rule)
    requests = make_requests(
        [PROMPT, [7]], max_new_tokens=24, temperature=temperature, prompt_bucket=16
    )
    found = speculative.generate(decoder, params, requests)
    plain = autoregressive.generate(decoder, params, requests)
    assert_same_tokens(texts(requests, found), texts(requests, plain))


def test_siblings_differ_in_what_they_pass_on_only_where_their_tokens_are_read() -> (
    None
):
    features = jax.random.normal(jax.random.key(5), (1, 1, 32))
    children = {}
    for inputs in INPUTS:
        model = eagle_model(tiny.head_config(inputs=inputs), "float32")
        params = params_of(inputs)
        tree = from_paths([(0,), (1,), (0, 0), (1, 0)])
        drafter = TreeDrafter(model=model, tree=tree)
        state = drafter.prefill(
            params.drafter,
            drafter.init_state(1, 16),
            jnp.array([[3]]),
            features,
            jnp.array([1]),
        )
        root = jnp.array([ROOT])
        found, _ = drafter.propose(params.drafter, state, root, make_draws(1))
        values = np.asarray(found.log_values[0])
        children[inputs] = values[3] - values[1], values[4] - values[2]
    # A feature's own token is the parent's, which siblings share.
    for inputs in ("feature+token", "feature"):
        one, other = children[inputs]
        np.testing.assert_allclose(one, other, rtol=1e-5)
    for inputs in ("feature+shifted", "token"):
        one, other = children[inputs]
        assert abs(one - other) > 1e-3
