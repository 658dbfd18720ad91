"""The cases that are compiled: published models on machines that they are run on."""

from eagle_jax.benchmarks.compilation import GPU, Case
from eagle_jax.config import TreeConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import parse_mesh


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


_MODELS = {
    "Llama-2-7B": _target((4096, 11008, 32, 32, 32, 32000), theta=1e4),
    "Llama-3-8B": _target((4096, 14336, 32, 32, 8, 128256), theta=5e5),
    "Llama-2-70B": _target((8192, 28672, 80, 64, 8, 32000), theta=1e4),
    "Llama-3-70B": _target((8192, 28672, 80, 64, 8, 128256), theta=5e5),
    "Mixtral-8x7B": _target((4096, 14336, 32, 32, 8, 32000), theta=1e6, experts=8),
}

# Model, topology, mesh, nodes, rows of a batch, rows of a training step.
_RUNS = (
    ("Llama-2-7B", GPU, "tensor=1", 60, 1, 1),
    ("Llama-3-8B", "v5e:2x2", "tensor=4", 60, 1, 1),
    ("Llama-3-8B", "v5e:2x2", "tensor=4", 60, 8, 4),
    ("Llama-3-8B", "v6e:1x1", "tensor=1", 60, 1, 1),
    ("Llama-3-8B", "v6e:2x2", "tensor=4", 60, 1, 4),
    ("Llama-3-8B", "v6e:2x2", "data=2,tensor=2", 60, 8, 4),
    ("Llama-2-70B", "v5p:2x2x2", "tensor=8", 48, 1, 4),
    ("Llama-3-70B", "v6e:4x4", "tensor=16", 48, 1, 4),
    ("Mixtral-8x7B", "v6e:2x2", "tensor=4", 60, 1, 1),
)


CASES = [
    Case(
        name=name,
        target=_MODELS[name],
        topology=topology,
        mesh=parse_mesh(mesh),
        tree=TreeConfig(num_nodes=num_nodes, depth=6, width=10),
        batch_size=batch_size,
        training_rows=training_rows,
    )
    for name, topology, mesh, num_nodes, batch_size, training_rows in _RUNS
]
"""All cases."""
