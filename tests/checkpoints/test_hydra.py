"""Hydra's heads as they are stored: scored by plain PyTorch, and refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle_jax.checkpoints import (
    export_hydra,
    hydra_config,
    load_hydra,
    load_target,
    target_config,
)
from eagle_jax.heads.hydra import model as hydra_heads
from eagle_jax.heads.hydra.model import HydraConfig
from tests.checkpoints.folders import change_config
from tests.conftest import NEEDS_TORCH, Main
from tests.helpers import file_bytes, refused

torch = pytest.importorskip("torch", reason=NEEDS_TORCH)

# These import torch themselves: without it the line above skips the file first.

from tests.checkpoints import judged_heads, judged_rounds  # noqa: E402
from tests.checkpoints.judged_heads import (  # noqa: E402
    PREFIX,
    damaged,
    hydra_logits,
    hydra_state,
    sizes_of,
    write_hydra,
)

pytestmark = pytest.mark.torch

FILE = "hydra_lm_head"
ARCHS = ("mlp", "prefix-mlp")


def target_folder(name: str, request: pytest.FixtureRequest) -> Path:
    if name == "tiny":
        return request.getfixturevalue("tiny_pair") / "target"
    return request.getfixturevalue("shared") / "models" / "stories260K"


@pytest.fixture
def tiny(tiny_pair: Path) -> Path:
    return tiny_pair / "target"


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["tiny", "stories260K"])
def test_heads_score_as_plain_pytorch_does(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, arch: str, layers: int
) -> None:
    folder = target_folder(name, request)
    state = hydra_state(sizes_of(folder), arch, heads=3, layers=layers)
    # The file says how many heads there are.
    heads = write_hydra(tmp_path / "heads", state, arch, hydra_num_layers=layers)
    config, params = load_hydra(heads, *load_target(folder))
    assert (config.num_heads, config.num_layers) == (3, layers)
    rng = np.random.default_rng(1)
    for head in range(3):
        width = (head + 2) * config.hidden_size
        inputs = rng.normal(size=(3, width)).astype(np.float32)
        found = hydra_heads.logits(params.heads[head], jax.numpy.array(inputs))
        for row in range(3):
            expected = hydra_logits(state, head, torch.from_numpy(inputs[row]))
            np.testing.assert_allclose(found[row], expected, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["tiny", "stories260K"])
def test_proposed_trees_are_those_of_plain_pytorch(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, arch: str
) -> None:
    """The prefix layer has read the prompt, and what later rounds accepted."""
    folder = target_folder(name, request)
    sizes = sizes_of(folder)
    state = hydra_state(sizes, arch)
    heads = write_hydra(tmp_path / "heads", state, arch)
    stored = load_file(folder / "model.safetensors")
    table = torch.from_numpy(stored["model.embed_tokens.weight"])

    def judge(hidden: np.ndarray, path: list[int]) -> np.ndarray:
        every = torch.from_numpy(hidden)
        if arch == "prefix-mlp":
            every = judged_heads.hydra_prefix(state, sizes, every)
        inputs = torch.cat([every[-1], *(table[token] for token in path)])
        return hydra_logits(state, len(path) - 1, inputs).numpy()

    pair = judged_rounds.load(folder, heads, "hydra")
    judged_rounds.check_trees(pair, [1, 7, 30, 4], judge)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_text_drafted_by_published_heads_is_plain_decodings(
    shared: Path,
    tmp_path: Path,
    main: Main,
    capsys: pytest.CaptureFixture[str],
    arch: str,
) -> None:
    folder = shared / "models" / "stories260K"
    heads = write_hydra(tmp_path / "heads", hydra_state(sizes_of(folder), arch), arch)
    flags = ["--target", str(folder), "--draft", str(heads), "--method", "hydra"]
    flags += ["--prompt", "Once upon a time", "--max-new-tokens", "32", "--compare"]
    assert main(flags) == 0
    assert "identical" in capsys.readouterr().out


def test_a_prefix_layer_is_a_llamas_whatever_the_target(
    tmp_path: Path, tiny: Path
) -> None:
    folder = write_hydra(
        tmp_path / "heads", hydra_state(sizes_of(tiny), "prefix-mlp"), "prefix-mlp"
    )
    layer = target_config(tiny).layer
    for changes in (
        {"qkv_bias": True},
        {"qk_norm": True},
        {"num_experts": 4, "experts_per_token": 2},
    ):
        changed = dataclasses.replace(layer, **changes)
        assert changed != layer
        assert hydra_config(folder, changed).layer == layer


def random_heads(config: HydraConfig) -> Any:
    params = hydra_heads.init_params(jax.random.key(3), config)
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(np.float32)), params
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_exported_heads_are_read_as_they_were(
    tmp_path: Path, tiny: Path, dtype: str, arch: str
) -> None:
    sizes, target = sizes_of(tiny), load_target(tiny)
    config = HydraConfig(
        num_heads=2,
        num_layers=3,
        hidden_size=sizes.width,
        vocab_size=sizes.vocabulary,
        layer=None if arch == "mlp" else target[0].layer.plain,
    )
    params = jax.tree.map(lambda x: x.astype(dtype), random_heads(config))
    folders = [tmp_path / "one", tmp_path / "another"]
    for folder in folders:
        export_hydra(folder, config, params, base_model="some/model", dtype=dtype)
    assert file_bytes(folders[0]) == file_bytes(folders[1])
    fields = json.loads((folders[0] / "config.json").read_text())
    assert fields["hydra_head_arch"] == arch
    assert fields["grounded_heads"] is True and fields["hidden_state_offset"] == 0
    for left_out in ("none", "safetensors"):
        (folders[0] / f"{FILE}.{left_out}").unlink(missing_ok=True)
        found = load_hydra(folders[0], *target, None)
        chex.assert_trees_all_equal(found, (config, params))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hydra_mlp.0.1.linear.weight": None}, ["lacks hydra_mlp.0.1.linear.weight"]),
        ({"hydra_lm_head.0.1.weight": None}, ["lacks hydra_lm_head.0.1.weight"]),
        ({"hydra_lm_head.2.1.bias": None}, ["lacks", "hydra_lm_head.2.1.bias"]),
        ({"hydra_mlp.1.5.linear.weight": None}, ["lacks", "hydra_mlp.1.5.linear"]),
        (
            {"hydra_mlp.1.1.res_connection.weight": torch.zeros(32, 64)},
            ["hydra_mlp.1.1.res_connection.weight", "(32, 64)", "(32, 96)"],
        ),
        (
            {f"{PREFIX}.layers.0.self_attn.k_proj.weight": torch.zeros(32, 32)},
            ["k_proj", "(32, 32)", "the target's layers ask for (16, 32)"],
        ),
        (
            {f"{PREFIX}.layers.1.mlp.up_proj.weight": torch.zeros(48, 32)},
            ["unexpected", f"{PREFIX}.layers.1.mlp.up_proj.weight"],
        ),
    ],
)
def test_tensors_that_are_no_heads_are_refused_by_name(
    tmp_path: Path, tiny: Path, change: dict[str, Any], named: list[str]
) -> None:
    state = damaged(hydra_state(sizes_of(tiny), "prefix-mlp"), change)
    folder = write_hydra(tmp_path / "heads", state, "prefix-mlp")
    layer = target_config(tiny).layer
    refused(lambda: hydra_config(folder, layer), str(folder), *named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hydra_head_arch": "eagle-attn"}, "eagle-attn"),
        ({"hydra_head_arch": "mlp"}, "hydra_head_arch mlp"),
        ({"hydra_num_layers": 2}, "hydra_num_layers = 2, but the file has 4"),
        ({"grounded_heads": False}, "grounded_heads = false"),
        ({"grounded_heads": "yes"}, "grounded_heads = 'yes'"),
        ({"hidden_state_offset": 1}, "hidden_state_offset = 1"),
    ],
)
def test_heads_that_cannot_run_are_refused_by_name(
    tmp_path: Path, tiny: Path, change: dict[str, Any], named: str
) -> None:
    state = hydra_state(sizes_of(tiny), "prefix-mlp")
    folder = write_hydra(tmp_path / "heads", state, "prefix-mlp")
    change_config(folder, **change)
    layer = target_config(tiny).layer
    refused(lambda: hydra_config(folder, layer), str(folder), named)


def test_a_prefix_layer_needs_the_targets_sizes(tmp_path: Path, tiny: Path) -> None:
    state = hydra_state(sizes_of(tiny), "prefix-mlp")
    folder = write_hydra(tmp_path / "heads", state, "prefix-mlp")
    refused(lambda: hydra_config(folder), str(folder), "give the target, too")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("size", "value", "named"),
    [("width", 48, "hidden_size is 48"), ("vocabulary", 299, "vocab_size is 299")],
)
def test_heads_of_another_target_are_refused(
    tmp_path: Path, tiny: Path, arch: str, size: str, value: int, named: str
) -> None:
    state = hydra_state(sizes_of(tiny)._replace(**{size: value}), arch)
    folder = write_hydra(tmp_path / "heads", state, arch)
    refused(lambda: judged_rounds.load(tiny, folder, "hydra"), named, "the target's")


def test_folders_of_other_methods_are_refused(tmp_path: Path, tiny_pair: Path) -> None:
    tiny, eagle = tiny_pair / "target", tiny_pair / "head"
    folder = write_hydra(tmp_path / "heads", hydra_state(sizes_of(tiny), "mlp"), "mlp")
    for method in ("eagle2", "medusa", "small-model"):
        refused(
            lambda method=method: judged_rounds.load(tiny, folder, method),
            *(str(folder), "Hydra heads", "method hydra", f"method {method} needs"),
        )
    refused(
        lambda: judged_rounds.load(tiny, eagle, "hydra"),
        *(str(eagle), "an EAGLE head", "method hydra needs the Hydra heads"),
    )
