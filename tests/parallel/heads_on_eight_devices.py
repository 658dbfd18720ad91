"""What a process with eight devices runs for `test_mesh_decoding`.

python -m tests.parallel.heads_on_eight_devices TINY_PAIR OUTPUT_FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from eagle_jax.checkpoints import export_hydra, export_medusa, target_config
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.config import Method, TreeConfig
from eagle_jax.generation.pairs import open_pair
from eagle_jax.models import hydra_heads, medusa_heads
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import MeshShape, shard_pair
from tests import tiny
from tests.conftest import load_main
from tests.parallel.on_eight_devices import held

SHAPE = MeshShape(data=2, tensor=4)
PATHS = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]


def write(folder: Path, kind: str, target: TransformerConfig) -> Method:
    """Writes random heads for the tiny target; returns their method."""
    assert target.layer == tiny.LAYER
    heads: Any = tiny.medusa(target.vocab_size)
    library: Any = medusa_heads
    method, export = "medusa", export_medusa
    if kind != "medusa":
        heads = tiny.hydra(target.vocab_size, has_prefix=kind == "hydra, prefix")
        library, method, export = hydra_heads, "hydra", export_hydra
    weights = tiny.random_like(shapes_of(library.init_params, heads.config))
    export(folder, heads.config, weights, base_model="tiny", with_pt=False)
    return method


def check(kind: str, pair: Path, home: Path) -> None:
    """The command with a mesh says what it says without, and heads are split."""
    target, folder = target_config(pair / "target"), home / kind
    method = write(folder, kind, target)
    choices = home / "choices.json"
    choices.write_text(json.dumps(PATHS))
    settings = home / "settings.toml"
    settings.write_text(f'[tree]\nchoices = "{choices}"\n')
    names = (str(pair / "target"), str(folder))
    tree = TreeConfig(choices=str(choices))
    source = open_pair(*names, tree=tree, dtype="float32", method=method)
    loaded = source.load(shard_pair(SHAPE, target, batch_size=2))
    heads = loaded.params.drafter.heads
    one = heads[0] if kind == "medusa" else heads.heads[0]
    assert held(one.output_head) == (target.layer.hidden_size, target.vocab_size // 4)
    assert held(one.blocks[0].linear) == (target.layer.hidden_size,) * 2

    flags = ["--target", names[0], "--draft", names[1], "--method", method]
    flags += ["--config", str(settings), "--batch-size", "2", "--temperature", "0.8"]
    flags += ["--prompt", "the", "--prompt", "ten", "--max-new-tokens", "12"]
    runs = []
    for extra in ([], ["--mesh", "data=2,tensor=4"]):
        file = home / f"{len(runs)}.json"
        assert load_main("generate")([*flags, *extra, "--json", str(file)]) == 0
        runs.append(json.loads(file.read_text())["runs"])
    assert runs[0] == runs[1]
    print("equal", kind, flush=True)


if __name__ == "__main__":
    assert jax.device_count() == 8
    for name in ("medusa", "hydra", "hydra, prefix"):
        check(name, Path(sys.argv[1]), Path(sys.argv[2]))
    print("done")
