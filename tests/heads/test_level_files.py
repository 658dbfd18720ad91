"""Heads of Medusa and Hydra, scored by plain PyTorch from published files."""

import dataclasses
from collections.abc import Callable
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
from eagle_jax.methods import METHODS, Context
from eagle_jax.tree import MEDUSA_TREE, from_paths
from tests.conftest import NEEDS_TORCH
from tests.heads.samples import load_head
from tests.helpers import refused
from tests.tiny import head_of

torch = pytest.importorskip("torch", reason=NEEDS_TORCH)

# These import torch themselves: without it the line above skips the file first.
from tests.heads import judged_rounds  # noqa: E402
from tests.heads.judged_heads import (  # noqa: E402
    hydra_logits,
    hydra_prefix,
    hydra_state,
    medusa_logits,
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

CASES: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 5, "layers": 1},
    "medusa, two blocks": {"heads": 1, "layers": 2},
    "medusa, without output heads": {"heads": 4, "layers": 1, "own_output": False},
    "mlp": {"heads": 3, "layers": 1},
    "mlp, more blocks": {"heads": 4, "layers": 4},
    "prefix-mlp": {"heads": 3, "layers": 1},
    "prefix-mlp, more blocks": {"heads": 4, "layers": 4},
}
Scores = Callable[[int, torch.Tensor], torch.Tensor]
"""Plain PyTorch: the number of a head and what it reads -> logits `[V]`."""


def publish(heads: Path, target: Path, case: str) -> tuple[Any, Scores]:
    """Writes heads of a case; returns their tensors, and how they score."""
    arch, sizes, options = case.split(",")[0], sizes_of(target), CASES[case]
    if arch == "medusa":
        state, lm_head = medusa_state(sizes, **options), output_head(target)
        write_medusa(heads, state)
        return state, lambda head, x: medusa_logits(state, head, x, lm_head)
    state = hydra_state(sizes, arch, **options)
    # The file says how many heads there are.
    write_hydra(heads, state, arch, hydra_num_layers=options["layers"])
    return state, lambda head, x: hydra_logits(state, head, x)


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["tiny", "stories260K"])
def test_heads_score_as_plain_pytorch_does(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, case: str
) -> None:
    folder = target_folder(name, request)
    _, scores = publish(tmp_path / "heads", folder, case)
    target = load_target(folder)
    config, weights = load_head(tmp_path / "heads", *target)
    read = {"heads": config.num_heads, "layers": config.num_layers}
    assert read.items() <= CASES[case].items()
    model = head_of(config)
    params = model.join(weights, target[1])
    rng = np.random.default_rng(1)
    for head in range(config.num_heads):
        width = config.hidden_size * (1 if "medusa" in case else head + 2)
        inputs = rng.normal(size=(3, width)).astype(np.float32)
        found = model.logits(params, jax.numpy.array(inputs), level=head + 1)
        for row in range(3):
            expected = scores(head, torch.from_numpy(inputs[row]))
            np.testing.assert_allclose(found[row], expected, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        "medusa",
        "medusa, without output heads",
        "mlp, more blocks",
        "prefix-mlp, more blocks",
    ],
)
def test_trees_are_those_of_plain_pytorch(
    tiny: Path, tmp_path: Path, case: str
) -> None:
    """The prefix layer has read the prompt, and what later rounds accepted."""
    state, scores = publish(tmp_path / "heads", tiny, case)
    stored = load_file(tiny / "model.safetensors")
    table = torch.from_numpy(stored["model.embed_tokens.weight"])

    def judge(hidden: np.ndarray, path: list[int]) -> np.ndarray:
        every, words = torch.from_numpy(hidden), [table[token] for token in path]
        if "prefix" in case:
            every = hydra_prefix(state, sizes_of(tiny), every)
        inputs = torch.cat([every[-1], *([] if "medusa" in case else words)])
        return scores(len(path) - 1, inputs).numpy()

    method = "medusa" if "medusa" in case else "hydra"
    pair = judged_rounds.load(tiny, tmp_path / "heads", method)
    judged_rounds.check_trees(pair, [1, 7, 30, 4], judge)


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
