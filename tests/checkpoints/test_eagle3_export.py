"""Exported EAGLE-3 heads: read back bit for bit, and run by plain PyTorch."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_jax.checkpoints.heads import eagle3_target
from safetensors.numpy import load_file

from eagle_jax.checkpoints import (
    convert_pair,
    eagle3_config,
    export_eagle3,
    load_target,
    names,
    read_eagle3_head,
)
from eagle_jax.heads import load_head
from eagle_jax.heads.eagle3 import model as eagle3_head
from eagle_jax.heads.eagle3.draft import Eagle3Head
from eagle_jax.heads.eagle3.model import Eagle3HeadConfig, Eagle3HeadParams
from tests import tiny
from tests.checkpoints.folders import change_config
from tests.conftest import load_main
from tests.helpers import refused

TARGET = eagle3_target(tiny.target_config(num_layers=7))
USUAL = Eagle3HeadConfig(
    draft_vocab_size=40,
    feature_size=TARGET.feature_size,
    **tiny.sizes(num_kv_heads=1, intermediate_size=40),
)
SAME = dataclasses.replace(USUAL, draft_vocab_size=64)
NORMS = dataclasses.replace(USUAL, has_feature_norms=True)
RECYCLING = dataclasses.replace(USUAL, recycles_normed=True)
BOTH = dataclasses.replace(NORMS, recycles_normed=True, feature_layers=(0, 1, 3))
NARROW = dataclasses.replace(
    USUAL, feature_layers=(1, 2, 6), layer=tiny.sizes(hidden_size=24)["layer"]
)
HEADS = {
    "usual": USUAL,
    "same vocabulary": SAME,
    "feature norms": NORMS,
    "recycling": RECYCLING,
    "both, with layers": BOTH,
    "narrow, with layers": NARROW,
}
KNOWN = np.setdiff1d(np.arange(64), np.arange(3, 51, 2))


def weights(config: Eagle3HeadConfig) -> Eagle3HeadParams:
    """Weights none of which is zero or one, with gaps between the tokens."""
    shapes = jax.eval_shape(
        lambda key: eagle3_head.init_params(key, config), jax.random.key(0)
    )
    params = tiny.random_like(dataclasses.replace(shapes, offsets=None))
    if config.layer.hidden_size != TARGET.layer.hidden_size:
        table = tiny.random_like(jnp.zeros((64, config.layer.hidden_size)))
        params = dataclasses.replace(params, embedding=table)
    if shapes.offsets is None:
        return params
    offsets = jax.device_put((KNOWN - np.arange(len(KNOWN))).astype(np.int32))
    return dataclasses.replace(params, offsets=offsets)


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
@pytest.mark.parametrize("head", HEADS)
def test_an_exported_head_is_the_one_that_is_read(
    tmp_path: Path, head: str, prefix: str
) -> None:
    config, params = HEADS[head], weights(HEADS[head])
    assert config.draft_vocab_size in (len(KNOWN), 64)
    export_eagle3(tmp_path / "head", config, params, prefix=prefix)
    found, read = read_eagle3_head(tmp_path / "head")
    assert found == config
    chex.assert_trees_all_equal(read, params)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert f"{prefix}.hidden_norm.weight" in stored
    has_maps = config is not SAME
    assert ("d2t" in stored, "t2d" in stored) == (has_maps, has_maps)
    if has_maps:
        assert (stored["d2t"].dtype, stored["t2d"].dtype) == (np.int64, np.bool_)
        np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), KNOWN)


def test_the_settings_of_a_head_are_the_published_ones(tmp_path: Path) -> None:
    export_eagle3(tmp_path / "head", NARROW, weights(NARROW), dtype="float16")
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        # The inputs of layers 1, 2 and 6 are the outputs of those before them.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 5],
        },
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "written_by": "eagle_jax",
    }


def judged_logits(folder: Path, table: Any, features: Any, tokens: Any) -> np.ndarray:
    """Logits of a chain in plain PyTorch, written from the formulas.

    The first pairs have true features `[n, F]`; those of the `tokens` after them are
    drafted. Only the last true pair and what follows it predict.
    """
    import torch

    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    is_speculators = "speculators_model_type" in config
    config |= config.pop("transformer_layer_config", {})
    prefix = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
    heads, width = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim", width // heads)
    half, theta = size // 2, config["rope_theta"]
    table = torch.tensor(np.asarray(stored.get("embed_tokens.weight", table)))

    def norm(x: Any, name: str) -> Any:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * stored[f"{name}.weight"]

    def turn(x: Any, position: int) -> Any:
        angle = position / theta ** (torch.arange(half) / half)
        one, two = x[:, :half], x[:, half:]
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def project(x: Any, name: str) -> Any:
        return linear(x, stored[f"{prefix}.{name}.weight"])

    keys: list[Any] = []
    values: list[Any] = []

    def run(token: int, feature: Any) -> Any:
        embedded = norm(table[token], f"{prefix}.input_layernorm")
        read = torch.cat([embedded, norm(feature, f"{prefix}.hidden_norm")])
        position, groups = len(keys), heads // config["num_key_value_heads"]
        query, key, value = (
            project(read, f"self_attn.{name}_proj").view(-1, size) for name in "qkv"
        )
        keys.append(turn(key, position).repeat_interleave(groups, 0))
        values.append(value.repeat_interleave(groups, 0))
        query = turn(query, position)
        scores = torch.stack([(query * key).sum(-1) for key in keys]) / math.sqrt(size)
        mixed = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0)
        x = feature + project(mixed.view(-1), "self_attn.o_proj")
        inner = norm(x, f"{prefix}.post_attention_layernorm")
        gated = silu(project(inner, "mlp.gate_proj")) * project(inner, "mlp.up_proj")
        return x + project(gated, "mlp.down_proj")

    found = []
    features = torch.tensor(np.asarray(features))
    feature = features[0]
    for place, token in enumerate(tokens):
        if place < len(features):
            feature = features[place]
            if config.get("fc_norm"):
                parts = enumerate(feature.chunk(3))
                feature = torch.cat([norm(x, f"fc_norm.{n}") for n, x in parts])
            feature = linear(feature, stored["fc.weight"])
        output = run(token, feature)
        normed = norm(output, "norm")
        feature = normed if is_speculators and config["norm_output"] else output
        if place >= len(features) - 1:
            found.append(linear(normed, stored["lm_head.weight"]))
    return torch.stack(found).numpy()


@pytest.mark.torch
@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
@pytest.mark.parametrize("head", HEADS)
def test_plain_torch_drafts_the_same_from_an_exported_head(
    tmp_path: Path, head: str, prefix: str
) -> None:
    target = tiny.target_params(TARGET)
    export_eagle3(tmp_path / "head", HEADS[head], weights(HEADS[head]), prefix=prefix)
    config, params = load_head(tmp_path / "head", TARGET, target)
    model, joined = Eagle3Head(config=config), Eagle3Head.join(params, target)
    features = jax.random.normal(jax.random.key(5), (1, 5, config.feature_size))
    drafted = [[9], [4]]

    state = model.advance(
        model.init_state(1, 8, 4),
        jnp.array([[5, 6, 7, 0, 0]]),
        features,
        jnp.array([3]),
    )
    output, state = model.read(joined, state, jnp.array([8]))
    outputs, earlier = [output[:, None]], None
    for level, token in enumerate(drafted, 1):
        above, seen = outputs[-1], jnp.ones((1, 1, level), bool)
        inputs = jnp.array([token]), above, seen, earlier
        output, earlier = model.step(joined, state, *inputs, level=level)
        outputs.append(output)
    logits = [model.logits(joined, output, level=1)[0, 0] for output in outputs]

    tokens = [6, 7, 8, 9, 4]
    judged = judged_logits(tmp_path / "head", target.embedding, features[0, :3], tokens)
    np.testing.assert_allclose(np.stack(logits), judged, rtol=1e-5, atol=1e-5)


def test_speculators_means_the_recycled_state_by_norm_output(tmp_path: Path) -> None:
    """SpecForge means what the output head reads, which is always normalised."""
    folder = tmp_path / "head"
    export_eagle3(folder, USUAL, weights(USUAL), with_bin=False)
    change_config(folder, norm_output=True)
    assert eagle3_config(folder) == USUAL
    change_config(folder, norm_output=False)
    refused(lambda: eagle3_config(folder), str(folder), "norm_output = false")
    change_config(folder, speculators_model_type="eagle3")
    assert eagle3_config(folder) == USUAL
    change_config(folder, norm_output=True)
    assert eagle3_config(folder) == RECYCLING


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"transformer_layer_config": [7]}, "[7] must be an object"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"fc_norm": [True]}, "fc_norm"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "[1, 2] must be three layers"),
    ],
)
def test_what_speculators_does_otherwise_is_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    folder = tmp_path / "head"
    export_eagle3(folder, RECYCLING, weights(RECYCLING), with_bin=False)
    change_config(folder, **change)
    refused(lambda: eagle3_config(folder), str(folder / "config.json"), named)


def test_feature_norms_and_their_field_go_together(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    for config, has in ((NORMS, False), (USUAL, True)):
        export_eagle3(folder, config, weights(config), with_bin=False, overwrite=True)
        change_config(folder, fc_norm=has)
        verb = "lacks" if has else "unexpected"
        refused(lambda: read_eagle3_head(folder), verb, "fc_norm.0.weight")


@pytest.mark.parametrize(
    ("offsets", "named"),
    [
        (None, "lacks d2t"),
        (np.zeros(39, np.int32), "(39,)"),
        (np.zeros(40, np.float32), "float32"),
        (np.full(40, 25, np.int32), "ascending"),
        (-np.arange(40, dtype=np.int32), "ascending"),
    ],
)
def test_a_map_that_leads_nowhere_is_not_written(
    tmp_path: Path, offsets: Any, named: str
) -> None:
    params = dataclasses.replace(weights(USUAL), offsets=offsets)
    refused(lambda: export_eagle3(tmp_path / "head", USUAL, params), "d2t", named)
    assert not (tmp_path / "head").exists()


def test_only_known_prefixes_are_written(tmp_path: Path) -> None:
    refused(
        lambda: export_eagle3(tmp_path / "head", USUAL, weights(USUAL), prefix="layer"),
        "'layer'",
        "midlayer or layers.0",
    )


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_converted_head_is_the_one_that_was_published(
    eagle3_pair: Path, tmp_path: Path, dtype: str | None
) -> None:
    head = eagle3_pair / "head"
    convert_pair(tmp_path / "pair", eagle3_pair / "target", head, dtype=dtype)
    target = load_target(tmp_path / "pair" / "target", None)
    expected = load_head(head, *load_target(eagle3_pair / "target"), dtype)
    converted = tmp_path / "pair" / "head"
    chex.assert_trees_all_equal(load_head(converted, *target, None), expected)

    output, back = tmp_path / "exported", load_main("export")
    command = ["--head", str(converted), "--output", str(output)]
    assert back([*command, "--prefix", "layers.0"]) == 0
    chex.assert_trees_all_equal(load_head(output, *target, None), expected)
    stored = load_file(output / "model.safetensors")
    assert set(stored) == {*names.EAGLE3_HEAD_ELSEWHERE.values(), *names.MAPS} & {
        *stored
    }


def test_export_writes_tables_of_eagle_3_heads_only_on_request(
    eagle3_pair: Path, tmp_path: Path
) -> None:
    command = ["--head", f"{eagle3_pair}/head", "--target", f"{eagle3_pair}/target"]
    command += ["--output", str(tmp_path / "head"), "--overwrite"]
    for choice, has in (([], False), (["--embedding", "include"], True)):
        assert load_main("export")([*command, *choice]) == 0
        stored = load_file(tmp_path / "head" / "model.safetensors")
        assert ("embed_tokens.weight" in stored) == has


def test_a_prefix_is_for_eagle_3_heads(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--head", f"{tiny_pair}/head", "--output", str(tmp_path / "head")]
    assert load_main("export")([*command, "--prefix", "midlayer"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error:") and "--prefix" in line and "EAGLE-3" in line
