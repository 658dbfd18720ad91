"""Our decoder beside the one of `transformers`, on the folders that it writes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import load_target
from eagle_jax.decoding import autoregressive
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer, TransformerParams

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MILLION = {"rope_type": "default", "rope_theta": 1000000.0}
_WINDOW = {"use_sliding_window": True, "sliding_window": 24}
# So many that a hundred rows read all, and one row reads few.
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24}
_PHI = {"sliding_window": 24, "pad_token_id": None}
_PARTIAL = "partial_rotary_factor"
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    _PARTIAL: 0.75,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0, 1.5, 4.0],
    "long_factor": [2.0, 3.0, 9.0],
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_TWO_ROPES = {_SLIDING: _LINEAR | {"factor": 2.0}, _FULL: _LINEAR}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "wide-heads": (
        "Llama",
        {"head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    ),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "linear-rope": ("Llama", {"rope_parameters": _LINEAR}),
    "yarn-rope": ("Qwen3", {"head_dim": 8, "rope_parameters": _YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-one-expert": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 24},
    ),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-shares-of-all": ("Qwen3Moe", _EXPERTS),
    "qwen2": ("Qwen2", {"rope_parameters": _MILLION}),
    "qwen2-window": ("Qwen2", _WINDOW | {"max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": _MILLION}),
    "qwen3-window": (
        "Qwen3",
        _WINDOW
        | {
            "head_dim": 8,
            "layer_types": [_SLIDING, _FULL],
        },
    ),
    "dynamic-rope": ("Llama", {"rope_parameters": _LINEAR | {"rope_type": "dynamic"}}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 16, "head_dim": 16, "sliding_window": 24}
        | {"rope_parameters": _YARN | {"factor": 32.0, "truncate": False}},
    ),
    "phi3": ("Phi3", _PHI | {"rope_parameters": _MILLION | {_PARTIAL: 0.75}}),
    "phi3-long": (
        "Phi3",
        _PHI | {"max_position_embeddings": 4096, "rope_parameters": _LONG},
    ),
    "gemma2": ("Gemma2", _GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3": (
        "Gemma3",
        _GEMMA | {"layer_types": [_SLIDING, _FULL], "rope_parameters": _TWO_ROPES},
    ),
}


pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*rope type '(dynamic|longrope)'"),
]


@pytest.fixture(params=_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A random model of `transformers`, and the folder that it wrote."""
    import torch
    import transformers

    family, changes = _MODELS[request.param]
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**_SIZES | changes)
    config._attn_implementation = "eager"  # Others know no soft caps.
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # They start as ones, which would hide a missing product.
            low = -0.5 if family.startswith("Gemma") else 0.5
            torch.nn.init.uniform_(weight, low, low + 1)
        if name.endswith("bias"):  # And these as zeros. A gate has bounds at 7.
            torch.nn.init.normal_(weight, std=5 if "gate_up" in name else 1)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_logits_and_greedy_texts_are_those_of_transformers(
    pair: tuple[Any, Path],
) -> None:
    import torch

    model, folder = pair
    config, params = load_target(folder)
    target = Transformer(config=config)
    rng = np.random.default_rng(1)
    tokens = rng.integers(config.vocab_size, size=(3, 600))
    lengths = np.array([600, 63, 1])
    is_real = np.arange(600)[None] < lengths[:, None]
    padded = np.where(is_real, tokens, 0)

    with torch.no_grad():
        wanted = model(
            torch.from_numpy(padded), attention_mask=torch.from_numpy(is_real * 1)
        ).logits.numpy()

    @jax.jit
    def logits(params: TransformerParams, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(600)[None], tokens.shape)
        cache = target.init_cache(3, 0)
        output = target.forward(params, tokens, positions, None, cache)
        return target.unembed(params, output.hidden)

    found = np.asarray(logits(params, jnp.asarray(padded)))
    assert found.dtype == np.float32
    assert np.abs(wanted).max() > 1, "the logits are large enough to compare"
    np.testing.assert_allclose(found[is_real], wanted[is_real], atol=1e-5, rtol=0)

    prompts = [tokens[0, :40].tolist(), tokens[2, :1].tolist()]
    requests = make_requests(prompts, max_new_tokens=32)
    state = autoregressive.generate(
        Decoder(target=target, acceptance="greedy"), Params(target=params), requests
    )
    for prompt, found in zip(prompts, state.tokens.tolist(), strict=True):
        text = found[: len(prompt) + 32]
        with torch.no_grad():  # It would say the same token by token.
            wanted = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
        assert text[len(prompt) :] == wanted[len(prompt) - 1 : -1]
