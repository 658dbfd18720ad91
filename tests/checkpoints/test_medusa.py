"""Medusa's heads as they are stored: scored by plain PyTorch, and refused by name."""

import json
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from eagle_jax.models.medusa_heads import MedusaConfig
from safetensors.numpy import load_file

from eagle_jax.checkpoints import (
    export_medusa,
    head_config,
    load_medusa,
    load_target,
    medusa_config,
    resolve,
)
from eagle_jax.config import StaticConfig, TreeConfig
from eagle_jax.drafting import MedusaHeads, TreeDrafter
from eagle_jax.methods import METHODS, Context
from eagle_jax.models import medusa_heads
from eagle_jax.tree import MEDUSA_TREE, from_paths
from tests.checkpoints.folders import change_config
from tests.conftest import NEEDS_TORCH, Main
from tests.helpers import file_bytes, refused

torch = pytest.importorskip("torch", reason=NEEDS_TORCH)

# These import torch themselves: without it the line above skips the file first.

from tests.checkpoints import judged_heads, judged_rounds  # noqa: E402
from tests.checkpoints.judged_heads import (  # noqa: E402
    damaged,
    medusa_state,
    sizes_of,
    write_medusa,
)

pytestmark = pytest.mark.torch

FILE = "medusa_lm_head"
LAYOUTS = {
    "published": {"heads": 5, "layers": 1},
    "two blocks": {"heads": 1, "layers": 2},
    "without output heads": {"heads": 4, "layers": 1, "own_output": False},
}


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
def test_heads_score_as_plain_pytorch_does(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, layout: str, suffix: str
) -> None:
    folder = target_folder(name, request)
    state = medusa_state(sizes_of(folder), **LAYOUTS[layout])
    heads = write_medusa(tmp_path / "heads", state, suffix)
    target = load_target(folder)
    config, weights = load_medusa(heads, *target)
    assert config.num_heads == LAYOUTS[layout]["heads"] == len(weights)
    model = MedusaHeads(config=config)
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
@pytest.mark.parametrize("name", ["tiny", "stories260K"])
def test_proposed_trees_are_those_of_plain_pytorch(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, layout: str
) -> None:
    folder = target_folder(name, request)
    state = medusa_state(sizes_of(folder), **LAYOUTS[layout])
    heads = write_medusa(tmp_path / "heads", state)

    def judge(hidden: np.ndarray, path: list[int]) -> np.ndarray:
        last = torch.from_numpy(hidden[-1])
        lm_head = output_head(folder)
        return judged_heads.medusa_logits(state, len(path) - 1, last, lm_head).numpy()

    pair = judged_rounds.load(folder, heads, "medusa")
    judged_rounds.check_trees(pair, [1, 7, 30, 4], judge)


def test_a_text_drafted_by_published_heads_is_plain_decodings(
    shared: Path, tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared / "models" / "stories260K"
    heads = write_medusa(tmp_path / "heads", medusa_state(sizes_of(folder)))
    flags = ["--target", str(folder), "--draft", str(heads), "--method", "medusa"]
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
    chex.assert_trees_all_equal(
        load_medusa(plain, *target), load_medusa(named, *target)
    )


def random_heads(config: MedusaConfig) -> Any:
    params = medusa_heads.init_params(jax.random.key(3), config)
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(np.float32)), params
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_output_heads", [True, False])
def test_exported_heads_are_read_as_they_were(
    tmp_path: Path, tiny: Path, dtype: str, has_output_heads: bool
) -> None:
    sizes = sizes_of(tiny)
    config = MedusaConfig(
        num_heads=3,
        num_layers=2,
        hidden_size=sizes.width,
        vocab_size=sizes.vocabulary,
        has_output_heads=has_output_heads,
    )
    heads = jax.tree.map(lambda x: x.astype(dtype), random_heads(config))
    folders = [tmp_path / "one", tmp_path / "another"]
    for folder in folders:
        export_medusa(folder, config, heads, base_model="some/model", dtype=dtype)
    assert file_bytes(folders[0]) == file_bytes(folders[1])
    fields = json.loads((folders[0] / "config.json").read_text())
    assert fields["medusa_num_heads"] == 3 and fields["medusa_num_layers"] == 2
    assert fields["base_model_name_or_path"] == "some/model"
    target = load_target(tiny)
    for left_out in ("none", "safetensors"):
        (folders[0] / f"{FILE}.{left_out}").unlink(missing_ok=True)
        found = load_medusa(folders[0], *target, None)
        chex.assert_trees_all_equal(found, (config, heads))
    export_medusa(folders[1], config, heads, base_model="other", overwrite=True)


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
    wanted = [any(Path(f"{FILE}.{suffix}").match(p) for p in call) for call in asked]
    assert wanted == ([True] if suffix == "safetensors" else [False, True])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"0.0.linear.weight": None}, ["lacks 0.0.linear.weight", "no Medusa heads"]),
        ({"3.0.linear.bias": None}, ["lacks", "3.0.linear.bias"]),
        ({"3.1.weight": None}, ["lacks", "3.1.weight"]),
        ({"0.1.weight": None}, ["unexpected", "4.1.weight"]),
        ({"9.0.linear.weight": torch.zeros(32, 32)}, ["lacks", "5.0.linear.weight"]),
        ({"2.0.linear.weight": torch.zeros(31, 32)}, ["2.0.linear.weight", "(31, 32)"]),
        ({"0.0.linear.weight": torch.zeros(())}, ["0.0.linear.weight", "shape ()"]),
        ({"0.1.weight": torch.zeros(())}, ["0.1.weight", "shape ()"]),
        ({"lm_head.weight": torch.zeros(1, 1)}, ["unexpected", "lm_head.weight"]),
    ],
)
def test_tensors_that_are_no_heads_are_refused_by_name(
    tmp_path: Path, tiny: Path, change: dict[str, Any], named: list[str]
) -> None:
    state = damaged(medusa_state(sizes_of(tiny)), change)
    folder = write_medusa(tmp_path / "heads", state)
    refused(lambda: medusa_config(folder, 300), str(folder), *named)


def test_heads_that_borrow_an_output_head_need_its_size(
    tmp_path: Path, tiny: Path
) -> None:
    state = medusa_state(sizes_of(tiny), own_output=False)
    folder = write_medusa(tmp_path / "heads", state)
    refused(lambda: medusa_config(folder), str(folder), "0.1.weight", "target, too")


def test_a_number_of_blocks_that_the_file_has_not_is_refused(
    tmp_path: Path, tiny: Path
) -> None:
    folder = write_medusa(tmp_path / "heads", medusa_state(sizes_of(tiny)))
    change_config(folder, medusa_num_layers=3)
    refused(lambda: medusa_config(folder), "medusa_num_layers = 3", "has 1")


@pytest.mark.parametrize(
    ("size", "value", "named"),
    [("width", 48, "hidden_size is 48"), ("vocabulary", 299, "vocab_size is 299")],
)
def test_heads_of_another_target_are_refused(
    tmp_path: Path, tiny: Path, size: str, value: int, named: str
) -> None:
    state = medusa_state(sizes_of(tiny)._replace(**{size: value}))
    folder = write_medusa(tmp_path / "heads", state)
    refused(lambda: judged_rounds.load(tiny, folder, "medusa"), named, "the target's")


def test_folders_of_other_methods_are_refused(tmp_path: Path, tiny_pair: Path) -> None:
    tiny, eagle = tiny_pair / "target", tiny_pair / "head"
    folder = write_medusa(tmp_path / "heads", medusa_state(sizes_of(tiny)))
    for method in ("eagle2", "eagle1", "chain", "hydra", "small-model"):
        refused(
            lambda method=method: judged_rounds.load(tiny, folder, method),
            *(str(folder), "Medusa heads", "method medusa", f"method {method} needs"),
        )
    for given, named in ((eagle, "an EAGLE head"), (tiny, "method small-model")):
        refused(
            lambda given=given: judged_rounds.load(tiny, given, "medusa"),
            *(str(given), named, "method medusa needs the Medusa heads"),
        )
    refused(lambda: head_config(folder), str(folder), "Medusa heads", "method medusa")


@pytest.mark.parametrize("heads", [1, 3])
def test_a_tree_is_cut_to_the_heads_unless_it_was_chosen(
    tmp_path: Path, tiny: Path, heads: int
) -> None:
    state = medusa_state(sizes_of(tiny), heads=heads)
    folder = write_medusa(tmp_path / "heads", state)
    drafter: Any = judged_rounds.load(tiny, folder, "medusa").drafter
    known = [path for path in MEDUSA_TREE.paths if len(path) <= heads]
    assert drafter.tree == from_paths(known)
    model, told = drafter.model, f"tree = 4 must be at most {heads}, one level per head"
    chosen = StaticConfig(choices="mc_sim_7b_63")
    context = Context(vocab_size=model.vocab_size, encode=lambda _: [], model=model)
    refused(lambda: METHODS["medusa"].drafter(chosen, context), told)
    dynamic = TreeConfig(num_nodes=9, depth=4)
    refused(lambda: TreeDrafter(model=model, tree=dynamic), told)
