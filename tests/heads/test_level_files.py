"""Heads of Medusa and Hydra, scored by plain PyTorch from published files."""

import dataclasses
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle_jax.checkpoints import load_target, resolve, target_config
from eagle_jax.config import StaticConfig, TreeConfig
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads import HEADS
from eagle_jax.heads import hydra as hydra_model
from eagle_jax.methods import METHODS, Context
from eagle_jax.tree import MEDUSA_TREE, from_paths
from tests.conftest import NEEDS_TORCH, Main
from tests.heads.samples import load_head
from tests.helpers import refused

torch = pytest.importorskip("torch", reason=NEEDS_TORCH)

# These import torch themselves: without it the line above skips the file first.
from tests.heads import judged_heads, judged_rounds  # noqa: E402
from tests.heads.judged_heads import (  # noqa: E402
    hydra_logits,
    hydra_state,
    medusa_state,
    sizes_of,
    write_hydra,
    write_medusa,
)

# Their files hold copies of the target's tables, too.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.* holds tensors that are not read"),
]

LAYOUTS = {
    "published": {"heads": 5, "layers": 1},
    "two blocks": {"heads": 1, "layers": 2},
    "without output heads": {"heads": 4, "layers": 1, "own_output": False},
}
ARCHS = ("mlp", "prefix-mlp")


def target_folder(name: str, request: pytest.FixtureRequest) -> Path:
    if name == "tiny":
        return request.getfixturevalue("tiny_pair") / "target"
    return request.getfixturevalue("shared") / "models" / "stories260K"


@pytest.fixture
def tiny(tiny_pair: Path) -> Path:
    return tiny_pair / "target"


def output_head(target: Path) -> Any:
    stored = load_file(target / "model.safetensors")
    table = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    return torch.from_numpy(table)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["tiny", "stories260K"])
def test_medusas_heads_score_as_plain_pytorch_does(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, layout: str, suffix: str
) -> None:
    folder = target_folder(name, request)
    state = medusa_state(sizes_of(folder), **LAYOUTS[layout])
    heads = write_medusa(tmp_path / "heads", state, suffix)
    target = load_target(folder)
    config, weights = load_head(heads, *target)
    assert config.num_heads == LAYOUTS[layout]["heads"] == len(weights.heads)
    model = HEADS["medusa"](config=config)
    params = model.join(weights, target[1])
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(3, config.hidden_size)).astype(np.float32)
    for head in range(config.num_heads):
        found = model.logits(params, jax.numpy.array(hidden), level=head + 1)
        for row in range(3):
            expected = judged_heads.medusa_logits(
                state, head, torch.from_numpy(hidden[row]), output_head(folder)
            )
            np.testing.assert_allclose(found[row], expected, atol=1e-5)


@pytest.mark.parametrize("layout", ["published", "without output heads"])
def test_trees_of_medusas_heads_are_those_of_plain_pytorch(
    tiny: Path, tmp_path: Path, layout: str
) -> None:
    state = medusa_state(sizes_of(tiny), **LAYOUTS[layout])
    heads = write_medusa(tmp_path / "heads", state)

    def judge(hidden: np.ndarray, path: list[int]) -> np.ndarray:
        last = torch.from_numpy(hidden[-1])
        lm_head = output_head(tiny)
        return judged_heads.medusa_logits(state, len(path) - 1, last, lm_head).numpy()

    pair = judged_rounds.load(tiny, heads, "medusa")
    judged_rounds.check_trees(pair, [1, 7, 30, 4], judge)


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["tiny", "stories260K"])
def test_hydras_heads_score_as_plain_pytorch_does(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, arch: str, layers: int
) -> None:
    folder = target_folder(name, request)
    state = hydra_state(sizes_of(folder), arch, heads=3, layers=layers)
    # The file says how many heads there are.
    heads = write_hydra(tmp_path / "heads", state, arch, hydra_num_layers=layers)
    config, params = load_head(heads, *load_target(folder))
    assert (config.num_heads, config.num_layers) == (3, layers)
    rng = np.random.default_rng(1)
    for head in range(3):
        width = (head + 2) * config.hidden_size
        inputs = rng.normal(size=(3, width)).astype(np.float32)
        found = hydra_model.head_logits(params.heads[head], jax.numpy.array(inputs))
        for row in range(3):
            expected = hydra_logits(state, head, torch.from_numpy(inputs[row]))
            np.testing.assert_allclose(found[row], expected, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_trees_of_hydras_heads_are_those_of_plain_pytorch(
    tiny: Path, tmp_path: Path, arch: str
) -> None:
    """The prefix layer has read the prompt, and what later rounds accepted."""
    sizes = sizes_of(tiny)
    state = hydra_state(sizes, arch)
    heads = write_hydra(tmp_path / "heads", state, arch)
    stored = load_file(tiny / "model.safetensors")
    table = torch.from_numpy(stored["model.embed_tokens.weight"])

    def judge(hidden: np.ndarray, path: list[int]) -> np.ndarray:
        every = torch.from_numpy(hidden)
        if arch == "prefix-mlp":
            every = judged_heads.hydra_prefix(state, sizes, every)
        inputs = torch.cat([every[-1], *(table[token] for token in path)])
        return hydra_logits(state, len(path) - 1, inputs).numpy()

    pair = judged_rounds.load(tiny, heads, "hydra")
    judged_rounds.check_trees(pair, [1, 7, 30, 4], judge)


@pytest.mark.parametrize("kind", ["medusa", "prefix-mlp"])
def test_a_text_drafted_by_published_heads_is_plain_decodings(
    shared: Path,
    tmp_path: Path,
    main: Main,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    folder = shared / "models" / "stories260K"
    sizes, heads = sizes_of(folder), tmp_path / "heads"
    if kind == "medusa":
        write_medusa(heads, medusa_state(sizes))
    else:
        write_hydra(heads, hydra_state(sizes, kind), kind)
    method = "medusa" if kind == "medusa" else "hydra"
    flags = ["--target", str(folder), "--draft", str(heads), "--method", method]
    flags += ["--prompt", "Once upon a time", "--max-new-tokens", "32", "--compare"]
    assert main(flags) == 0
    assert "identical" in capsys.readouterr().out


def test_the_rest_of_a_whole_models_state_is_left_out(
    tmp_path: Path, tiny: Path
) -> None:
    state = medusa_state(sizes_of(tiny))
    plain = write_medusa(tmp_path / "plain", state)
    inside = {f"medusa_head.{name}": tensor for name, tensor in state.items()}
    inside["lm_head.weight"] = torch.zeros(1, 1)
    named = write_medusa(tmp_path / "named", inside)
    target = load_target(tiny)
    chex.assert_trees_all_equal(load_head(plain, *target), load_head(named, *target))


def test_a_prefix_layer_is_a_llamas_whatever_the_target(
    tmp_path: Path, tiny: Path
) -> None:
    folder = write_hydra(
        tmp_path / "heads", hydra_state(sizes_of(tiny), "prefix-mlp"), "prefix-mlp"
    )
    target = target_config(tiny)
    for changes in (
        {"qkv_bias": True},
        {"qk_norm": True},
        {"num_experts": 4, "experts_per_token": 2},
    ):
        layer = dataclasses.replace(target.layer, **changes)
        changed = dataclasses.replace(target, layer=layer)
        assert HEADS["hydra"].read_config(folder, changed).layer == target.layer


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_one_kind_of_weights_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path, suffix: str
) -> None:
    folder = write_medusa(tmp_path / "heads", medusa_state(sizes_of(tiny)), suffix)
    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("some/heads") == folder
    wanted = [
        any(Path(f"medusa_lm_head.{suffix}").match(p) for p in call) for call in asked
    ]
    assert wanted == ([True] if suffix == "safetensors" else [False, True])


@pytest.mark.parametrize("heads", [1, 3])
def test_a_tree_is_cut_to_the_heads_unless_it_was_chosen(
    tmp_path: Path, tiny: Path, heads: int
) -> None:
    state = medusa_state(sizes_of(tiny), heads=heads)
    folder = write_medusa(tmp_path / "heads", state)
    drafter: Any = judged_rounds.load(tiny, folder, "medusa").drafter
    known = [path for path in MEDUSA_TREE.paths if len(path) <= heads]
    assert drafter.tree == from_paths(known)
    model, told = (
        drafter.model,
        f"tree = 4 must be at most {heads}, all that is drafted",
    )
    chosen = StaticConfig(choices="mc_sim_7b_63")
    context = Context(vocab_size=model.vocab_size, encode=lambda _: [], model=model)
    refused(lambda: METHODS["medusa"].drafter(chosen, context), told)
    dynamic = TreeConfig(num_nodes=9, depth=4)
    refused(lambda: TreeDrafter(model=model, tree=dynamic), told)
