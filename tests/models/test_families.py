"""Every family of targets verifies a tree as it decodes each of its paths."""

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
from eagle_jax.models import transformer
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import Transformer
from tests.tiny import GPT_OSS, ROPES, target_config

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
    params = transformer.init_params(jax.random.key(3), config)
    keys = iter(jax.random.split(jax.random.key(4), len(jax.tree.leaves(params))))
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params
    )
    return Transformer(config=config), params


def _hidden(
    target: Transformer, params: Any, tokens: jax.Array, lengths: list[int]
) -> list[np.ndarray]:
    """Hidden states of whole rows, each decoded token by token."""
    found = []
    for row, length in zip(tokens, lengths, strict=True):
        cache, outputs = target.init_cache(1, 64), []
        for position in range(length):
            output = target.forward(
                params,
                row[None, position : position + 1],
                jnp.full((1, 1), position),
                None,
                cache,
            )
            zero = jnp.zeros((1, 1), jnp.int32)
            cache = target.commit(cache, output.entries, zero, jnp.ones(1, jnp.int32))
            outputs.append(output.hidden[0, 0])
        found.append(np.stack(outputs))
    return found


def test_a_tree_is_verified_as_each_of_its_paths_is_decoded(
    pair: tuple[Transformer, Any],
) -> None:
    """Siblings, dead branches and padding after a shorter row change nothing."""
    target, params = pair
    rng = np.random.default_rng(5)
    num_nodes, lengths = len(_PARENTS), [_PROMPT, 3]
    prompts = jnp.asarray(rng.integers(64, size=(2, _PROMPT)))
    nodes = jnp.asarray(rng.integers(64, size=(2, num_nodes)))
    is_ancestor = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        is_ancestor[node] |= is_ancestor[_PARENTS[node]]
    depths = is_ancestor.sum(-1) - 1
    positions = jnp.broadcast_to(jnp.arange(_PROMPT), (2, _PROMPT))
    prefill = target.forward(params, prompts, positions, None, target.init_cache(2, 0))
    count = jnp.asarray(lengths)
    cache = target.commit(target.init_cache(2, 64), prefill.entries, positions, count)
    mask = jnp.broadcast_to(is_ancestor, (2, num_nodes, num_nodes))
    verified = target.forward(
        params, nodes, count[:, None] + depths[None], mask, cache
    ).hidden

    for row, length in enumerate(lengths):
        for leaf in (4, 5, 7, 11):
            path = np.flatnonzero(is_ancestor[leaf])
            text = jnp.concatenate([prompts[row, :length], nodes[row, path]])
            (wanted,) = _hidden(target, params, text[None], [len(text)])
            np.testing.assert_allclose(
                np.asarray(prefill.hidden[row, :length]), wanted[:length], atol=1e-4
            )
            np.testing.assert_allclose(
                np.asarray(verified[row, path]), wanted[length:], atol=1e-4
            )


@pytest.mark.parametrize(
    "pair",
    ["mistral", "qwen3-moe", "qwen3", "phi3", "gpt-oss", "gemma2", "gemma3"],
    indirect=True,
)
def test_the_text_is_plain_decodings(pair: tuple[Transformer, Any]) -> None:
    """Where the model drafts for itself: paths of all lengths are accepted."""
    target, params = pair
    requests = make_requests(
        [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7]],
        max_new_tokens=16,
        temperature=[0.0, 1.0],
        seeds=[3, 4],
    )
    plain = autoregressive.generate(
        Decoder(target=target, acceptance="coupled"), Params(target=params), requests
    )
    drafter = TreeDrafter(
        model=SmallModel(target=target, vocab_size=target.config.vocab_size),
        tree=TreeConfig(num_nodes=6, depth=2, width=2),
    )
    found = speculative.generate(
        Decoder(target=target, drafter=drafter, acceptance="coupled"),
        Params(target=params, drafter=params),
        requests,
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert int(found.num_rounds[0]) <= 16 / 1.5  # Most drafts are accepted.
