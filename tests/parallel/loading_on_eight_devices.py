"""What a process with eight devices runs for `test_mesh_decoding`.

python -m tests.parallel.loading_on_eight_devices TINY_PAIR OUTPUT_FOLDER
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from eagle_jax import load_pair
from eagle_jax.checkpoints import Export, load_target, target_config
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.config import StaticConfig, TreeConfig
from eagle_jax.decoding import autoregressive
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.heads import export_head
from eagle_jax.interface import Params
from eagle_jax.models.linear import at_once, linear
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import MeshShape, shard_pair
from eagle_jax.parallel.placement import target_shardings
from tests import tiny
from tests.checkpoints.folders import SINGLE, change_weights
from tests.conftest import load_main
from tests.heads.samples import load_head
from tests.helpers import settings_of
from tests.parallel.on_eight_devices import held

SHAPE = MeshShape(data=2, tensor=4)
# Of one of two devices, for a matrix split over its outputs and one over its inputs.
HELD = {
    8: {"gate": ((32, 24), (1, 24)), "down": ((24, 32), (1, 32))},
    4: {"gate": ((16, 24), (2, 24)), "down": ((12, 32), (1, 32))},
}
PATHS = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]


def write(folder: Path, target: TransformerConfig, heads: Any) -> str:
    """Writes random heads for the tiny target; returns their method."""
    assert target.layer == tiny.LAYER
    weights = tiny.random_like(shapes_of(heads.init))
    export_head(folder, heads, weights, Export(with_pickle=False))
    return heads.name


def check_heads(pair: Path, home: Path) -> None:
    """The command with a mesh says what it says without, and heads are split."""
    target, folder = target_config(pair / "target"), home / "hydra"
    method = write(folder, target, tiny.hydra(target.vocab_size, has_prefix=True))
    choices = home / "choices.json"
    choices.write_text(json.dumps(PATHS))
    settings = home / "settings.toml"
    settings.write_text(f'[tree]\nchoices = "{choices}"\n')
    names = (str(pair / "target"), str(folder))
    tree = StaticConfig(choices=str(choices))
    config = settings_of(tree, method=method, batch_size=2)
    loaded = load_pair(*names, config, mesh=SHAPE)
    one = loaded.params.drafter.head.heads[0]
    assert held(one.output_head) == (target.layer.hidden_size, target.vocab_size // 4)
    assert held(one.blocks[0].linear) == (target.layer.hidden_size,) * 2

    flags = ["--target", names[0], "--draft", names[1], "--method", method]
    check_texts([*flags, "--config", str(settings)], home)
    print("equal hydra, prefix", flush=True)
    sizes: Any = {"num_target_layers": target.num_layers}
    block = tiny.block(target.vocab_size, is_next=True, **sizes)
    method = write(home / "block", target, block)
    flags = ["--target", names[0], "--draft", str(home / "block"), "--method", method]
    check_texts([*flags, "--num-nodes", "6", "--width", "2"], home)
    print("equal dspark", flush=True)


def check_narrowed(pair: Path, home: Path) -> None:
    """A draft vocabulary is split like any, or whole where it cannot be."""
    target, file = target_config(pair / "target"), home / "text.txt"
    file.write_text("the heart of the matter")
    names = (str(pair / "target"), str(pair / "head"))
    for size, columns in ((100, 25), (99, 99)):
        chosen = {"draft_vocabulary": f"{size}@{file}", "batch_size": 2}
        loaded = load_pair(*names, settings_of(TreeConfig(), **chosen), mesh=SHAPE)
        params = loaded.params.drafter
        assert held(params.output_head) == (target.layer.hidden_size, columns)
    flags = ["--target", names[0], "--draft", names[1]]
    flags += ["--draft-vocabulary", f"100@{file}", "--num-nodes", "5", "--depth", "2"]
    check_texts([*flags, "--width", "2", "--draft-quantization", "int8"], home)
    print("equal draft vocabulary", flush=True)


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


def check_loading(folder: Path) -> None:
    """What is loaded onto a mesh is what one device has, each part where it belongs."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("model"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def choose(leaf: jax.Array) -> NamedSharding:
        return rows if leaf.shape[0] % 4 == 0 and leaf.ndim == 2 else everywhere

    config, params = load_target(folder / "target")
    head_params = load_head(folder / "head", config, params)[1]
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(params))
    shardings = jax.tree.map(choose, params)
    for given in (everywhere, shardings):
        sharded = load_target(folder / "target", shardings=given)[1]
        jax.tree.map(np.testing.assert_array_equal, sharded, params)
        wanted = jax.tree.map(lambda _: everywhere, params)
        wanted = wanted if given is everywhere else given
        assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == wanted
    mlp: Any = sharded.layers[0].mlp
    assert held(mlp.up) == (8, 48)
    # The second head has a table that its shardings do not name.
    for name in ("head", "own"):
        spread = jax.tree.map(choose, head_params)
        one = load_head(folder / name, config, params)[1]
        head = load_head(folder / name, config, sharded, "float32", spread)[1]
        jax.tree.map(np.testing.assert_array_equal, head, one)
        assert head.fc.sharding == rows
        assert (name == "own") == (head.embedding is not None)
    assert head.embedding.sharding == sharded.embedding.sharding


def check_quantized(folder: Path, bits: int) -> None:
    config, params = load_target(folder, bits=bits)
    sharding = shard_pair(
        MeshShape(tensor=2), config, batch_size=1, devices=jax.devices()[:2]
    )
    shardings = target_shardings(sharding, config, bits)
    there = load_target(folder, "float32", shardings, bits)[1]
    jax.tree.map(np.testing.assert_array_equal, there, params)
    for name, expected in HELD[bits].items():
        weight = getattr(there.layers[0].mlp, name)
        parts = held(weight.values), held(weight.scales)
        assert parts == expected, (name, parts)
    check_products(params, there)

    target = Transformer(config=config)
    requests = make_requests([[298, 5, 9]], max_new_tokens=12)

    def decode(params: Any) -> np.ndarray:
        state = autoregressive.generate(
            Decoder(target=target, acceptance="greedy"), Params(target=params), requests
        )
        return np.asarray(state.tokens)

    np.testing.assert_array_equal(decode(there), decode(params))
    print("equal bits", bits, flush=True)


def check_products(params: Any, there: Any) -> None:
    """Both forms of the product, of what is split over outputs and over inputs."""
    for name, size in (("gate", 32), ("down", 48)):
        x = jax.random.normal(jax.random.key(0), (3, size))
        whole = getattr(params.layers[0].mlp, name)
        split = getattr(there.layers[0].mlp, name)
        for product in (linear, at_once):
            np.testing.assert_allclose(
                jax.jit(product)(x, split), jax.jit(product)(x, whole), atol=1e-5
            )


if __name__ == "__main__":
    assert jax.device_count() == 8
    pair, home = Path(sys.argv[1]), Path(sys.argv[2])
    source = Path(shutil.copytree(pair, home / "source"))
    shutil.copytree(source / "head", source / "own")
    table = load_file(source / "own" / SINGLE)["embed_tokens.weight"] + 1
    change_weights(source / "own", embed_tokens__weight=table)
    check_loading(source)
    print("equal files")
    for bits in (8, 4):
        check_quantized(pair / "target", bits)
    check_heads(pair, home)
    check_narrowed(pair, home)
    print("done")
