"""The cases that are compiled: published models on machines that they are run on."""

import dataclasses

from eagle_jax.benchmarks.compilation import GPU, Case
from eagle_jax.benchmarks.models import MODELS
from eagle_jax.config import TreeConfig
from eagle_jax.parallel import parse_mesh

# Model, topology, mesh, nodes, rows of a batch, rows of a training step.
_RUNS = (
    ("Llama-3-8B", GPU, "tensor=1", 60, 1, 1),
    ("Llama-3-8B", "v5e:2x2", "tensor=4", 60, 1, 1),
    ("Llama-3-8B", "v5e:2x2", "tensor=4", 60, 8, 4),
    ("Llama-3-8B", "v6e:1x1", "tensor=1", 60, 1, 1),
    ("Llama-3-8B", "v6e:2x2", "tensor=4", 60, 1, 4),
    ("Llama-3-8B", "v6e:2x2", "data=2,tensor=2", 60, 8, 4),
    ("Llama-2-70B", "v5p:2x2x2", "tensor=8", 48, 1, 4),
    ("Llama-3-70B", "v6e:4x4", "tensor=16", 48, 1, 4),
    ("Mixtral-8x7B", "v6e:2x2", "tensor=4", 60, 1, 1),
)


_EAGLE = [
    Case(
        name=name,
        target=MODELS[name],
        topology=topology,
        mesh=parse_mesh(mesh),
        tree=TreeConfig(num_nodes=num_nodes, depth=6, width=10),
        batch_size=batch_size,
        training_rows=training_rows,
    )
    for name, topology, mesh, num_nodes, batch_size, training_rows in _RUNS
]
CASES = [
    *_EAGLE,
    *(
        dataclasses.replace(case, kind="dspark")
        for case in _EAGLE
        if case.mesh.num_devices == 1
    ),
]
"""All cases."""
