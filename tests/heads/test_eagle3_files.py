"""EAGLE-3 heads as they are stored: token maps, fields, and plain PyTorch's drafts."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.heads import open_head
from eagle_jax.heads.eagle3 import Eagle3Head, feature_layers
from eagle_jax.models.rope import RopeConfig
from tests import tiny
from tests.checkpoints.folders import change_config, change_weights
from tests.conftest import HIDDEN, KNOWN, VOCABULARY
from tests.heads.samples import (
    EAGLE3,
    NARROW,
    NORMS,
    QWEN3,
    RECYCLING,
    TARGET,
    USUAL,
    load_head,
    read,
    write,
)
from tests.heads.samples import KNOWN as SAMPLE_KNOWN
from tests.helpers import refused

_FILE = "model.safetensors"
_OFFSETS = np.zeros(KNOWN, np.int64)
sizes_in = Eagle3Head.read_config


@pytest.fixture
def head(eagle3_pair: Path, tmp_path: Path) -> Path:
    """A copy of the head to change at will."""
    return Path(shutil.copytree(eagle3_pair / "head", tmp_path / "head"))


def test_tokens_of_the_head_are_the_stored_ones(head: Path) -> None:
    stored = load_file(head / _FILE)
    offsets = open_head(head).offsets
    assert offsets is not None and offsets.dtype == np.int32
    tokens = np.arange(KNOWN) + np.asarray(offsets)
    np.testing.assert_array_equal(tokens, np.flatnonzero(stored["t2d"]))
    change_weights(head, t2d=None)  # It says nothing that d2t does not.
    np.testing.assert_array_equal(open_head(head).offsets, offsets)


@pytest.mark.torch
def test_official_files_of_both_kinds_hold_one_head(
    shared: Path, tmp_path: Path
) -> None:
    folder = shared / "models" / "random9-eagle3"
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copyfile(folder / name, tmp_path / name)
    chex.assert_trees_all_equal(read(tmp_path, target=None), read(folder, target=None))


def test_equal_vocabularies_need_no_map(head: Path) -> None:
    change_config(head, draft_vocab_size=VOCABULARY)
    lm_head = np.ones((VOCABULARY, HIDDEN), np.float32)
    # A map that changes nothing is as good as none.
    identity = np.zeros(VOCABULARY, np.int64)
    for offsets, is_known in ((None, None), (identity, identity == 0)):
        change_weights(head, lm_head__weight=lm_head, d2t=offsets, t2d=is_known)
        assert open_head(head).offsets is None


@pytest.mark.parametrize(
    ("offsets", "named"),
    [
        (None, "lacks d2t"),
        (_OFFSETS[1:], "(149,)"),
        (_OFFSETS.astype(np.float32), "float32"),
        (_OFFSETS - 1, "ascending"),
        (_OFFSETS + VOCABULARY - KNOWN + 1, "ascending"),
        (_OFFSETS - np.arange(KNOWN), "ascending"),
        (np.arange(KNOWN) * 2, "it holds offsets, not tokens"),
    ],
)
def test_a_map_that_leads_nowhere_is_refused(
    head: Path, offsets: np.ndarray | None, named: str
) -> None:
    change_weights(head, d2t=offsets, t2d=None)
    refused(lambda: open_head(head), str(head), named)


def test_maps_that_disagree_are_refused(head: Path) -> None:
    flipped = load_file(head / _FILE)["t2d"].copy()
    flipped[7] = ~flipped[7]
    for is_known in (flipped, flipped[1:]):
        change_weights(head, t2d=is_known)
        refused(lambda: open_head(head), str(head), "d2t and t2d")


def test_other_tensors_of_integers_are_refused(head: Path) -> None:
    change_weights(head, norm__weight=np.ones(HIDDEN, np.int64))
    refused(lambda: read(head, target=None), "norm.weight", "int64")


@pytest.mark.parametrize("name", ["eagle3", "eagle3, same vocabulary"])
def test_a_map_is_written_where_vocabularies_differ(tmp_path: Path, name: str) -> None:
    stored = load_file(write(tmp_path / "head", EAGLE3[name]) / _FILE)
    if name != "eagle3":
        assert not {"d2t", "t2d"} & stored.keys()
        return
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), SAMPLE_KNOWN)


def test_the_settings_of_a_head_are_the_published_ones(tmp_path: Path) -> None:
    write(tmp_path / "head", NARROW, dtype="float16")
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
        # The inputs of layers 2, 3 and 6 are the outputs of those before them.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        },
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "written_by": "eagle_jax",
    }


def test_everything_of_a_head_is_its_own(head: Path) -> None:
    found = sizes_in(head)
    assert found.layer.rope == RopeConfig(theta=10000.0)  # Where none is named.
    assert (found.layer.intermediate_size, found.layer.num_kv_heads) == (40, 4)
    assert (found.vocab_size, found.draft_vocab_size) == (VOCABULARY, KNOWN)
    assert found.feature_size == 3 * HIDDEN
    change_config(head, rope_theta=5e5, num_hidden_layers=40, target_hidden_size=48)
    found = sizes_in(head)
    assert (found.layer.rope, found.feature_size) == (RopeConfig(theta=5e5), 3 * 48)
    change_config(head, draft_vocab_size=None, eagle_config={})
    assert sizes_in(head).draft_vocab_size == VOCABULARY


def test_norm_output_means_the_recycled_state(tmp_path: Path) -> None:
    """Older heads of SpecForge meant another thing by it, and have no `fc_norm`."""
    folder = write(tmp_path / "head", USUAL)
    change_config(folder, norm_output=False)
    assert sizes_in(folder) == USUAL
    change_config(folder, norm_output=True)
    with pytest.warns(UserWarning, match="norm_output = true is read as EAGLE-3.1's"):
        assert sizes_in(folder) == RECYCLING
    change_config(folder, speculators_model_type="eagle3")
    assert sizes_in(folder) == RECYCLING
    folder = write(tmp_path / "normed", NORMS)
    change_config(folder, norm_output=True)
    assert sizes_in(folder) == dataclasses.replace(NORMS, recycles_normed=True)


@pytest.mark.parametrize("named", [[1, 3, 4], [2, 4, 5]])
def test_layers_are_named_by_their_outputs_where_the_first_is_1(
    tmp_path: Path, named: list[int]
) -> None:
    folder = write(tmp_path / "head", USUAL)
    fields = {"eagle_aux_hidden_state_layer_ids": named}
    for changes, layers in (
        ({"eagle_config": {"use_aux_hidden_state": True} | fields}, (2, 4, 5)),
        ({"eagle_config": None} | fields, (2, 4, 5)),
        ({"speculators_model_type": "eagle3"}, tuple(named)),
    ):
        change_config(folder, **changes)
        assert sizes_in(folder).feature_layers == layers
    change_config(folder, num_aux_hidden_states=2)
    refused(lambda: sizes_in(folder), "num_aux_hidden_states = 2", "3 layers")


def test_how_a_head_was_read_is_told() -> None:
    varied = dataclasses.replace(NORMS, recycles_normed=True, num_layers=2)
    told = tiny.head_of(varied).describe(TARGET)
    assert told == (
        "an EAGLE-3 head that reads the inputs of layers 2, 3, 4 of the target's 7, "
        "normalises each of them, goes on from its normalised output, has 2 layers, "
        "knows 40 of 64 tokens, was trained to 512 positions"
    )


def test_tensors_decide_where_fields_of_a_layer_are_wrong(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", QWEN3)
    change_config(folder, head_dim=20, model_type="llama")
    with pytest.warns(UserWarning, match="head_dim = 20, but 4 query heads have 32"):
        assert sizes_in(folder) == QWEN3
    query = np.array(1, np.float32)
    change_weights(folder, midlayer__self_attn__q_proj__weight=query)
    refused(lambda: read(folder), "midlayer.self_attn.q_proj.weight has shape ()")
    change_weights(folder, layers__1__mlp_norm=np.ones(3))
    assert sizes_in(folder).num_layers == 2
    refused(lambda: read(folder), "lacks tensors: layers.1.input_layernorm")


def test_a_target_needs_three_different_features() -> None:
    head = tiny.head_of(USUAL)
    for num_layers in range(1, 100):
        target = tiny.target_config(num_layers=num_layers)
        low, middle, high = feature_layers(num_layers)
        is_enough = 0 < low < middle < high < num_layers
        assert is_enough == (num_layers >= 7)
        if is_enough:
            found = head.with_features(target)
            assert found.feature_layers == (2, num_layers // 2, num_layers - 3)
            assert found.feature_size == 3 * 32
        else:
            wanted = f"{num_layers} layers", "7"
            refused(lambda other=target: head.with_features(other), *wanted)


def judged_logits(folder: Path, tables: Any, features: Any, tokens: Any) -> np.ndarray:
    """Logits of a chain in plain PyTorch, written from the formulas.

    The target's tables stand in where a head has none of its own. The first pairs have
    true features `[n, F]`; those of the `tokens` after them are drafted. Only the last
    true pair and what follows it predict.
    """
    import torch

    silu = torch.nn.functional.silu
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("transformer_layer_config", {})
    first = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
    later = [f"layers.{n}" for n in range(1, config["num_hidden_layers"])]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    table = stored.get("embed_tokens.weight", torch.tensor(np.array(tables.embedding)))
    stored.setdefault("lm_head.weight", torch.tensor(np.array(tables.output_head).T))
    window = config["sliding_window"] if config.get("layer_types") else len(tokens)
    known: dict[str, tuple[list[Any], list[Any]]]
    known = {name: ([], []) for name in (first, *later)}

    def linear(x: Any, name: str) -> Any:
        return x @ stored[f"{name}.weight"].T

    def norm(x: Any, name: str) -> Any:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * stored[f"{name}.weight"]

    def turn(x: Any, position: int) -> Any:
        angle = position / config["rope_theta"] ** (torch.arange(0, size, 2) / size)
        half = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(1), angle)
        return torch.cat([half.real, half.imag], -1)

    def through(layer: str, stream: Any, read: Any) -> Any:
        (keys, values), attention = known[layer], f"{layer}.self_attn"
        query, key, value = (
            linear(read, f"{attention}.{name}_proj").view(-1, size) for name in "qkv"
        )
        if f"{attention}.q_norm.weight" in stored:
            query, key = (
                norm(query, f"{attention}.q_norm"),
                norm(key, f"{attention}.k_norm"),
            )
        query = turn(query, len(keys))
        keys.append(turn(key, len(keys)).repeat_interleave(heads // groups, 0))
        values.append(value.repeat_interleave(heads // groups, 0))
        near = [(query * key).sum(-1) for key in keys[-window:]]
        shares = (torch.stack(near) / math.sqrt(size)).softmax(0)
        mixed = (shares[..., None] * torch.stack(values[-window:])).sum(0)
        x = stream + linear(mixed.view(-1), f"{attention}.o_proj")
        inner = norm(x, f"{layer}.post_attention_layernorm")
        gated = silu(linear(inner, f"{layer}.mlp.gate_proj"))
        gated = gated * linear(inner, f"{layer}.mlp.up_proj")
        return x + linear(gated, f"{layer}.mlp.down_proj")

    found, feature = [], None
    for place, token in enumerate(tokens):
        if place < len(features):
            feature = torch.tensor(np.array(features[place]))
            if config.get("norm_before_fc"):
                feature = norm(feature, "input_norm")
            if config.get("fc_norm"):
                parts = enumerate(feature.split(tiny.LAYER.hidden_size))
                feature = torch.cat([norm(x, f"fc_norm.{n}") for n, x in parts])
            feature = linear(feature, "fc")
        embedded = norm(table[token], f"{first}.input_layernorm")
        normed = norm(feature, f"{first}.hidden_norm")
        stream = normed if config.get("norm_before_residual") else feature
        output = through(first, stream, torch.cat([embedded, normed]))
        for layer in later:
            output = through(layer, output, norm(output, f"{layer}.input_layernorm"))
        normed = norm(output, "norm")
        feature = normed if config.get("norm_output") else output
        if place >= len(features) - 1:
            found.append(linear(normed, "lm_head"))
    return torch.stack(found).numpy()


def drafted_logits(head: Eagle3Head, params: Any, tables: Any, features: Any) -> Any:
    """Logits of the last of 3 true pairs, and of tokens 9 and 4 drafted after it."""
    joined, waiting = head.join(params, tables), jnp.array([[5, 6, 7, 0, 0]])
    state = head.advance(head.init_state(1, 8, 4), waiting, features, jnp.array([3]))
    output, state = head.read(joined, state, jnp.array([8]))
    outputs, earlier = [output[:, None]], None
    for level, token in enumerate([9, 4], 1):
        seen = jnp.ones((1, 1, level), bool)
        inputs = jnp.array([[token]]), outputs[-1], seen, earlier
        output, earlier = head.step(joined, state, *inputs, level=level)
        outputs.append(output)
    return np.stack([head.logits(joined, x, level=1)[0, 0] for x in outputs])


@pytest.mark.torch
@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
@pytest.mark.parametrize("name", EAGLE3)
def test_plain_torch_drafts_the_same_from_an_exported_head(
    tmp_path: Path, name: str, prefix: str
) -> None:
    target = tiny.target_params(TARGET)
    write(tmp_path / "head", EAGLE3[name], layout=prefix, with_pickle=True)
    config, params = load_head(tmp_path / "head", TARGET, target)
    features = jax.random.normal(jax.random.key(5), (1, 5, config.feature_size))
    found = drafted_logits(Eagle3Head(config=config), params, target, features)
    judged = judged_logits(tmp_path / "head", target, features[0, :3], [6, 7, 8, 9, 4])
    np.testing.assert_allclose(found, judged, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "kv_heads", "megabytes"),
    [
        ((4096, 14336, 32, 1, 128256), 8, 849.4),
        ((5120, 13824, 40, 40, 32000), 40, 1277),
    ],
)
def test_published_sizes_have_the_published_bytes(
    tmp_path: Path, sizes: tuple[int, ...], kv_heads: int, megabytes: float
) -> None:
    names = "hidden_size intermediate_size num_attention_heads num_hidden_layers"
    fields = dict(zip([*names.split(), "vocab_size"], sizes, strict=True))
    fields |= {"num_key_value_heads": kv_heads, "draft_vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({"lm_head.weight": np.zeros(1)}, tmp_path / _FILE)
    head = Eagle3Head(config=Eagle3Head.read_config(tmp_path))
    shapes = jax.eval_shape(lambda key: head.init(key, "float16"), jax.random.key(0))
    assert (shapes.offsets is not None) == (sizes[-1] > 32000)
    leaves = jax.tree.leaves(dataclasses.replace(shapes, offsets=None))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e6
    assert size == pytest.approx(megabytes, rel=1e-3)
