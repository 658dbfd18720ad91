"""The sizes of published models, and of a small one, by name."""

from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig


def _target(
    sizes: tuple[int, int, int, int, int, int], *, theta: float, experts: int = 0
) -> TransformerConfig:
    """Returns a decoder: width, inner width, layers, heads, key/value heads, tokens."""
    width, inner, layers, heads, kv_heads, vocabulary = sizes
    layer = LayerConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=theta),
        num_experts=experts,
        experts_per_token=2 if experts else 0,
    )
    return TransformerConfig(
        layer=layer, num_layers=layers, vocab_size=vocabulary, max_positions=8192
    )


MODELS = {
    "50m": _target((512, 1408, 8, 8, 8, 32000), theta=1e4),
    "Llama-2-7B": _target((4096, 11008, 32, 32, 32, 32000), theta=1e4),
    "Llama-3-8B": _target((4096, 14336, 32, 32, 8, 128256), theta=5e5),
    "Llama-2-70B": _target((8192, 28672, 80, 64, 8, 32000), theta=1e4),
    "Llama-3-70B": _target((8192, 28672, 80, 64, 8, 128256), theta=5e5),
    "Mixtral-8x7B": _target((4096, 14336, 32, 32, 8, 32000), theta=1e6, experts=8),
}
"""The sizes by name."""
