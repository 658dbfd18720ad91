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
from eagle_jax.config import StaticConfig, TreeConfig
from eagle_jax.generation.pairs import open_pair
from eagle_jax.heads.hydra import model as hydra_heads
from eagle_jax.heads.medusa import model as medusa_heads
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import MeshShape, shard_pair
from tests import tiny
from tests.conftest import load_main
from tests.helpers import settings_of
from tests.parallel.on_eight_devices import held

SHAPE = MeshShape(data=2, tensor=4)
PATHS = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]


def write(folder: Path, kind: str, target: TransformerConfig) -> str:
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
    tree = StaticConfig(choices=str(choices))
    source = open_pair(*names, settings_of(tree, method=method))
    loaded = source.load(shard_pair(SHAPE, target, batch_size=2))
    heads = loaded.params.drafter.heads
    one = heads[0] if kind == "medusa" else heads.heads[0]
    assert held(one.output_head) == (target.layer.hidden_size, target.vocab_size // 4)
    assert held(one.blocks[0].linear) == (target.layer.hidden_size,) * 2

    flags = ["--target", names[0], "--draft", names[1], "--method", method]
    check_texts([*flags, "--config", str(settings)], home)
    print("equal", kind, flush=True)


def check_narrowed(method: str, pair: Path, home: Path, size: int) -> None:
    """A draft vocabulary is split like any, or whole where it cannot be."""
    target, file = target_config(pair / "target"), home / "vocabulary.json"
    ids = [target.vocab_size - 1, *range(size - 1)]
    file.write_text(json.dumps({"vocab_size": target.vocab_size, "ids": ids}))
    draft = "target" if method == "small-model" else "head"
    names = (str(pair / "target"), str(pair / draft))
    tree = TreeConfig(num_nodes=5, depth=2, width=2)
    settings = settings_of(tree, method=method, draft_vocabulary=str(file))
    source = open_pair(*names, settings)
    params = source.load(shard_pair(SHAPE, target, batch_size=2)).params.drafter
    head = getattr(params, "model", params).output_head
    assert held(head) == (target.layer.hidden_size, size if size % 4 else size // 4)
    flags = ["--target", names[0], "--draft", names[1], "--method", method]
    flags += ["--draft-vocabulary", str(file), "--num-nodes", "5", "--depth", "2"]
    check_texts([*flags, "--width", "2"], home)
    print("equal", method, size, flush=True)


def check_texts(flags: list[str], home: Path) -> None:
    """The command with a mesh says what it says without."""
    flags = [*flags, "--batch-size", "2", "--temperature", "0.8"]
    flags += ["--prompt", "the", "--prompt", "ten", "--max-new-tokens", "12"]
    runs = []
    for extra in ([], ["--mesh", "data=2,tensor=4"]):
        file = home / f"{len(runs)}.json"
        assert load_main("generate")([*flags, *extra, "--json", str(file)]) == 0
        runs.append(json.loads(file.read_text())["runs"])
    assert runs[0] == runs[1]


if __name__ == "__main__":
    assert jax.device_count() == 8
    for name in ("medusa", "hydra", "hydra, prefix"):
        check(name, Path(sys.argv[1]), Path(sys.argv[2]))
    check_narrowed("small-model", Path(sys.argv[1]), Path(sys.argv[2]), 100)
    check_narrowed("eagle2", Path(sys.argv[1]), Path(sys.argv[2]), 99)
    print("done")
