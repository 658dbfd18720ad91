"""Every family of targets verifies a tree as it decodes each of its paths."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import SmallModel, TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import Transformer
from tests.tiny import GPT_OSS, ROPES, random_target, target_config

_PROMPT = 20
# Node 0 is the root; siblings are told apart, paths are of different lengths.
_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 3, 6, 8, 9, 10])

_GEMMA = {
    "num_layers": 2,
    "activation": "gelu_pytorch_tanh",
    "norm_offset": True,
    "output_norms": True,
    "query_scalar": 24.0,
    "sliding_window": 5,
    "windowed_layers": (0,),
    "embedding_scale": 32**0.5,
    "tie_embeddings": True,
}
_FAMILIES = {
    "llama": target_config(num_layers=2),
    "mistral": target_config(num_layers=2, sliding_window=7, windowed_layers=(0, 1)),
    "mistral-next-token": target_config(
        num_layers=2, sliding_window=1, windowed_layers=(0, 1)
    ),
    "mixtral": target_config(num_layers=2, num_experts=4, experts_per_token=2),
    # A token alone reads its own experts, a tree reads all.
    "qwen3-moe": target_config(
        num_layers=2,
        qk_norm=True,
        num_experts=16,
        experts_per_token=3,
        expert_size=20,
        shares_of_all=True,
    ),
    "qwen2": target_config(
        num_layers=2, qkv_bias=True, sliding_window=4, windowed_layers=(1,)
    ),
    "qwen3": target_config(num_layers=2, qk_norm=True, head_dim=12),
    "biases": target_config(num_layers=2, qkv_bias=True, output_bias=True),
    "gpt-oss": target_config(
        num_layers=2,
        **GPT_OSS | {"num_experts": 16},
        sliding_window=6,
        windowed_layers=(0,),
    ),
    "phi3": target_config(
        num_layers=2,
        rope=RopeConfig(
            theta=1e4,
            kind="longrope",
            factors=(1.0, 1.5, 4.0),
            attention_factor=1.2,
            fraction=0.75,
        ),
    ),
    "gemma2": target_config(**_GEMMA, score_cap=2.0, logit_cap=3.0),
    "gemma3": target_config(**_GEMMA, qk_norm=True, window_rope=ROPES[2]),
}


@pytest.fixture(scope="module", params=_FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Transformer, Any]:
    """A model with weights large enough to tell its tokens apart."""
    config = _FAMILIES[request.param]
    return Transformer(config=config), random_target(config)


@functools.partial(jax.jit, static_argnums=0)
def _step(target: Transformer, params: Any, token: jax.Array, cache: Any) -> Any:
    """The hidden state `[E]` of one more token of a text, and the cache with it."""
    length = cache.length
    output = target.forward(params, token[None, None], length[:, None], None, cache)
    zero, one = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    return output.hidden[0, 0], target.commit(cache, output.entries, zero, one)


def _hidden(target: Transformer, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Hidden states of a text, decoded token by token."""
    cache, outputs = target.init_cache(1, 64), []
    for token in tokens:
        output, cache = _step(target, params, token, cache)
        outputs.append(output)
    return np.stack(outputs)


def test_a_tree_is_verified_as_each_of_its_paths_is_decoded(
    pair: tuple[Transformer, Any],
) -> None:
    """Siblings, dead branches and padding after a shorter row change nothing."""
    target, params = pair
    rng = np.random.default_rng(5)
    num_nodes, lengths = len(_PARENTS), [_PROMPT, 3]
    prompts = rng.integers(64, size=(2, _PROMPT))
    nodes = rng.integers(64, size=(2, num_nodes))
    is_ancestor = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        is_ancestor[node] |= is_ancestor[_PARENTS[node]]
    depths = is_ancestor.sum(-1) - 1

    @jax.jit
    def verify(params: Any, prompts: Any, nodes: Any) -> tuple[jax.Array, jax.Array]:
        places = jnp.broadcast_to(jnp.arange(_PROMPT), (2, _PROMPT))
        read = target.forward(params, prompts, places, None, target.init_cache(2, 0))
        count = jnp.asarray(lengths)
        cache = target.commit(target.init_cache(2, 64), read.entries, places, count)
        mask = jnp.broadcast_to(is_ancestor, (2, num_nodes, num_nodes))
        places = count[:, None] + depths[None]
        tree = target.forward(params, nodes, places, mask, cache)
        return read.hidden, tree.hidden

    prefill, verified = map(np.asarray, verify(params, prompts, nodes))
    for row, length in enumerate(lengths):
        for leaf in (4, 5, 7, 11):
            path = np.flatnonzero(is_ancestor[leaf])
            text = np.concatenate([prompts[row, :length], nodes[row, path]])
            wanted = _hidden(target, params, text)
            found = np.concatenate([prefill[row, :length], verified[row, path]])
            np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("pair", ["gpt-oss", "gemma3"], indirect=True)
def test_the_text_is_plain_decodings(pair: tuple[Transformer, Any]) -> None:
    """Where the model drafts for itself: paths of all lengths are accepted."""
    target, params = pair
    requests = make_requests(
        [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7]],
        max_new_tokens=16,
        temperature=[0.0, 1.0],
        seeds=[3, 4],
    )
    drafter = TreeDrafter(
        model=SmallModel(target=target, vocab_size=target.config.vocab_size),
        tree=TreeConfig(num_nodes=6, depth=2, width=2),
    )
    decoder = Decoder(target=target, drafter=drafter)
    both = Params(target=params, drafter=params)
    plain = autoregressive.generate(decoder, both, requests)
    found = speculative.generate(decoder, both, requests)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert int(found.num_rounds[0]) <= 16 / 1.5  # Most drafts are accepted.
