"""EAGLE-3 heads as they are stored: token maps, fields, and plain PyTorch's drafts."""

import dataclasses
import functools
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
from safetensors.numpy import load_file

from eagle_jax.checkpoints import load_target
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.heads import HEADS
from eagle_jax.heads.eagle3 import model as eagle3_head
from eagle_jax.heads.eagle3.files import read_fields
from eagle_jax.heads.eagle3.head import Eagle3Head
from eagle_jax.heads.eagle3.model import Eagle3HeadConfig, feature_layers
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from tests import tiny
from tests.checkpoints.folders import change_config, change_weights
from tests.eagle3_pair import HIDDEN, KNOWN, VOCABULARY
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

Loaded = tuple[TransformerConfig, TransformerParams]

KIND = HEADS["eagle3"]
_FILE = "model.safetensors"
_OFFSETS = np.zeros(KNOWN, np.int64)


@pytest.fixture(scope="module")
def target(eagle3_pair: Path) -> Loaded:
    return load_target(eagle3_pair / "target")


@pytest.fixture
def head(eagle3_pair: Path, tmp_path: Path) -> Path:
    """A copy of the head to change at will."""
    return Path(shutil.copytree(eagle3_pair / "head", tmp_path / "head"))


def load(folder: Path, target: Loaded) -> Any:
    return load_head(folder, *target)[1]


def test_tokens_of_the_head_are_the_stored_ones(head: Path, target: Loaded) -> None:
    stored = load_file(head / _FILE)
    offsets = load(head, target).offsets
    assert offsets is not None and offsets.dtype == np.int32
    tokens = np.arange(KNOWN) + np.asarray(offsets)
    np.testing.assert_array_equal(tokens, np.flatnonzero(stored["t2d"]))
    change_weights(head, t2d=None)  # It says nothing that d2t does not.
    np.testing.assert_array_equal(load(head, target).offsets, offsets)


@pytest.mark.torch
def test_official_files_of_both_kinds_hold_one_head(
    shared: Path, tmp_path: Path
) -> None:
    folder = shared / "models" / "random9-eagle3"
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copyfile(folder / name, tmp_path / name)
    pair = load_target(shared / "models" / "random9")
    chex.assert_trees_all_equal(load(tmp_path, pair), load(folder, pair))


def test_equal_vocabularies_need_no_map(head: Path, target: Loaded) -> None:
    change_config(head, draft_vocab_size=VOCABULARY)
    lm_head = np.ones((VOCABULARY, HIDDEN), np.float32)
    change_weights(head, lm_head__weight=lm_head, d2t=None, t2d=None)
    assert load(head, target).offsets is None
    # A map that changes nothing is as good as none.
    identity = np.zeros(VOCABULARY, np.int64)
    change_weights(head, d2t=identity, t2d=identity == 0)
    assert load(head, target).offsets is None


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
    head: Path, target: Loaded, offsets: np.ndarray | None, named: str
) -> None:
    change_weights(head, d2t=offsets, t2d=None)
    refused(lambda: load(head, target), str(head), named)


def test_maps_that_disagree_are_refused(head: Path, target: Loaded) -> None:
    flipped = load_file(head / _FILE)["t2d"].copy()
    flipped[7] = ~flipped[7]
    for is_known in (flipped, flipped[1:]):
        change_weights(head, t2d=is_known)
        refused(lambda: load(head, target), str(head), "d2t and t2d")


def test_other_tensors_of_integers_are_refused(head: Path, target: Loaded) -> None:
    change_weights(head, norm__weight=np.ones(HIDDEN, np.int64))
    refused(lambda: load(head, target), "norm.weight", "int64")


@pytest.mark.parametrize("name", EAGLE3)
def test_a_map_is_written_where_vocabularies_differ(tmp_path: Path, name: str) -> None:
    config = EAGLE3[name]
    stored = load_file(write(tmp_path / "head", config) / _FILE)
    has_maps = config.draft_vocab_size < config.vocab_size
    assert ("d2t" in stored, "t2d" in stored) == (has_maps, has_maps)
    if has_maps:
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
    found = KIND.read_config(head)
    assert found.layer.rope == RopeConfig(theta=10000.0)  # Where none is named.
    assert found.layer.intermediate_size == 40
    assert found.layer.num_kv_heads == 4
    assert (found.vocab_size, found.draft_vocab_size) == (VOCABULARY, KNOWN)
    assert found.feature_size == 3 * HIDDEN
    change_config(head, rope_theta=5e5, num_hidden_layers=40, target_hidden_size=48)
    found = KIND.read_config(head)
    assert found.layer.rope == RopeConfig(theta=5e5)
    assert found.feature_size == 3 * 48
    change_config(head, draft_vocab_size=None, eagle_config={})
    assert KIND.read_config(head).draft_vocab_size == VOCABULARY


def test_norm_output_means_the_recycled_state(tmp_path: Path) -> None:
    """Older heads of SpecForge meant another thing by it, and have no `fc_norm`."""
    folder = write(tmp_path / "head", USUAL)
    change_config(folder, norm_output=False)
    assert KIND.read_config(folder) == USUAL
    change_config(folder, norm_output=True)
    with pytest.warns(UserWarning, match="norm_output = true is read as EAGLE-3.1's"):
        assert KIND.read_config(folder) == RECYCLING
    change_config(folder, speculators_model_type="eagle3")
    assert KIND.read_config(folder) == RECYCLING
    folder = write(tmp_path / "normed", NORMS)
    change_config(folder, norm_output=True)
    assert KIND.read_config(folder) == dataclasses.replace(NORMS, recycles_normed=True)


@pytest.mark.parametrize(
    ("named", "layers"), [([1, 3, 4], (2, 4, 5)), ([2, 4, 5], (2, 4, 5))]
)
def test_layers_are_named_by_their_outputs_where_the_first_is_1(
    tmp_path: Path, named: list[int], layers: tuple[int, ...]
) -> None:
    folder = write(tmp_path / "head", USUAL)
    usual = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": named}
    change_config(folder, eagle_config=usual)
    assert KIND.read_config(folder).feature_layers == layers
    change_config(folder, eagle_config=None, eagle_aux_hidden_state_layer_ids=named)
    assert KIND.read_config(folder).feature_layers == layers
    change_config(folder, speculators_model_type="eagle3")
    assert KIND.read_config(folder).feature_layers == tuple(named)
    change_config(folder, num_aux_hidden_states=2)
    refused(lambda: KIND.read_config(folder), "num_aux_hidden_states = 2", "3 layers")


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
        assert KIND.read_config(folder) == QWEN3
    query = np.array(1, np.float32)
    change_weights(folder, midlayer__self_attn__q_proj__weight=query)
    refused(lambda: read(folder), "midlayer.self_attn.q_proj.weight has shape ()")
    change_weights(folder, layers__1__mlp_norm=np.ones(3))
    assert KIND.read_config(folder).num_layers == 2
    refused(lambda: read(folder), "lacks tensors: layers.1.input_layernorm")


def test_a_target_needs_three_different_features() -> None:
    def wanted(num_layers: int) -> TransformerConfig:
        target = tiny.target_config(num_layers=num_layers)
        return tiny.head_of(USUAL).with_features(target)

    for num_layers in range(7, 100):
        found = wanted(num_layers)
        low, middle, high = found.feature_layers
        assert 0 < low < middle < high < num_layers
        assert (low, middle, high) == (2, num_layers // 2, num_layers - 3)
        assert found.feature_size == 3 * 32
    for num_layers in range(1, 7):
        low, middle, high = feature_layers(num_layers)
        assert not 0 < low < middle < high
        refused(lambda n=num_layers: wanted(n), f"{num_layers} layers", "7")


def turned(x: Any, position: int, *, theta: float) -> Any:
    """Queries or keys `[heads, 2 * half]`, rotated in halves by their position."""
    import torch

    half = x.shape[1] // 2
    angle = position / theta ** (torch.arange(half) / half)
    one, two = x[:, :half], x[:, half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def judged_logits(folder: Path, tables: Any, features: Any, tokens: Any) -> np.ndarray:
    """Logits of a chain in plain PyTorch, written from the formulas.

    The target's tables stand in where a head has none of its own. The first pairs have
    true features `[n, F]`; those of the `tokens` after them are drafted. Only the last
    true pair and what follows it predict.
    """
    import torch

    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("transformer_layer_config", {})
    prefix = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
    heads, width = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim", width // heads)
    own = stored.get("embed_tokens.weight")
    table = torch.tensor(np.asarray(tables.embedding if own is None else own))
    borrowed = torch.tensor(np.asarray(tables.output_head).T)
    window = config["sliding_window"] if config.get("layer_types") else len(tokens)

    def norm(x: Any, name: str) -> Any:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * stored[f"{name}.weight"]

    turn = functools.partial(turned, theta=config["rope_theta"])
    known: dict[str, tuple[list[Any], list[Any]]] = {
        name: ([], []) for name in (prefix, "layers.1", "layers.2")
    }

    def run(token: int, feature: Any) -> Any:
        embedded = norm(table[token], f"{prefix}.input_layernorm")
        normed = norm(feature, f"{prefix}.hidden_norm")
        x = normed if config.get("norm_before_residual") else feature
        x = through(prefix, x, torch.cat([embedded, normed]))
        for later in [f"layers.{n}" for n in range(1, config["num_hidden_layers"])]:
            x = through(later, x, norm(x, f"{later}.input_layernorm"))
        return x

    def through(prefix: str, stream: Any, read: Any) -> Any:
        def project(x: Any, name: str) -> Any:
            return linear(x, stored[f"{prefix}.{name}.weight"])

        keys, values = known[prefix]
        position, groups = len(keys), heads // config["num_key_value_heads"]
        query, key, value = (
            project(read, f"self_attn.{name}_proj").view(-1, size) for name in "qkv"
        )
        if f"{prefix}.self_attn.q_norm.weight" in stored:
            query = norm(query, f"{prefix}.self_attn.q_norm")
            key = norm(key, f"{prefix}.self_attn.k_norm")
        keys.append(turn(key, position).repeat_interleave(groups, 0))
        values.append(value.repeat_interleave(groups, 0))
        query = turn(query, position)
        near = [(query * key).sum(-1) for key in keys[-window:]]
        scores = torch.stack(near) / math.sqrt(size)
        mixed = (scores.softmax(0)[..., None] * torch.stack(values[-window:])).sum(0)
        x = stream + project(mixed.view(-1), "self_attn.o_proj")
        inner = norm(x, f"{prefix}.post_attention_layernorm")
        gated = silu(project(inner, "mlp.gate_proj")) * project(inner, "mlp.up_proj")
        return x + project(gated, "mlp.down_proj")

    found = []
    features = torch.tensor(np.asarray(features))
    feature = features[0]
    for place, token in enumerate(tokens):
        if place < len(features):
            feature = features[place]
            if config.get("norm_before_fc"):
                feature = norm(feature, "input_norm")
            if config.get("fc_norm"):
                parts = enumerate(feature.split(tiny.LAYER.hidden_size))
                feature = torch.cat([norm(x, f"fc_norm.{n}") for n, x in parts])
            feature = linear(feature, stored["fc.weight"])
        output = run(token, feature)
        normed = norm(output, "norm")
        feature = normed if config.get("norm_output") else output
        if place >= len(features) - 1:
            found.append(linear(normed, stored.get("lm_head.weight", borrowed)))
    return torch.stack(found).numpy()


def drafted_logits(
    config: Eagle3HeadConfig, params: Any, tables: Any, features: Any
) -> np.ndarray:
    """Logits of the last of 3 true pairs, and of tokens 9 and 4 drafted after it."""
    model, joined = Eagle3Head(config=config), Eagle3Head.join(params, tables)
    state = model.advance(
        model.init_state(1, 8, 4),
        jnp.array([[5, 6, 7, 0, 0]]),
        features,
        jnp.array([3]),
    )
    output, state = model.read(joined, state, jnp.array([8]))
    outputs, earlier = [output[:, None]], None
    for level, token in enumerate([[9], [4]], 1):
        above, seen = outputs[-1], jnp.ones((1, 1, level), bool)
        inputs = jnp.array([token]), above, seen, earlier
        output, earlier = model.step(joined, state, *inputs, level=level)
        outputs.append(output)
    return np.stack([model.logits(joined, x, level=1)[0, 0] for x in outputs])


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
    found = drafted_logits(config, params, target, features)
    judged = judged_logits(tmp_path / "head", target, features[0, :3], [6, 7, 8, 9, 4])
    np.testing.assert_allclose(found, judged, rtol=1e-5, atol=1e-5)

    # Read in any other way it drafts otherwise, so what stands above can fail.
    for field in ("norm_before_residual", "recycles_normed"):
        other = dataclasses.replace(config, **{field: not getattr(config, field)})
        wrong = drafted_logits(other, params, target, features)
        assert np.abs(wrong[-1] - judged[-1]).max() > 1e-2, field


def _hub_head(folder: Path, **sizes: int) -> Eagle3HeadConfig:
    common = {"model_type": "llama", "max_position_embeddings": 2048}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(common | sizes))
    return read_fields(Fields.read(folder), {})


def test_published_sizes_have_the_published_bytes(tmp_path: Path) -> None:
    llama = _hub_head(
        tmp_path / "llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=128256,
        draft_vocab_size=32000,
    )
    vicuna = _hub_head(
        tmp_path / "vicuna",
        hidden_size=5120,
        intermediate_size=13824,
        num_attention_heads=40,
        num_hidden_layers=40,
        vocab_size=32000,
        draft_vocab_size=32000,
    )
    for config, megabytes in ((llama, 849.4), (vicuna, 1277)):
        shapes = jax.eval_shape(
            lambda key, config=config: eagle3_head.init_params(key, config, "float16"),
            jax.random.key(0),
        )
        has_map = config.draft_vocab_size < config.vocab_size
        assert (shapes.offsets is not None) == has_map
        leaves = jax.tree.leaves(dataclasses.replace(shapes, offsets=None))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e6
        assert size == pytest.approx(megabytes, rel=1e-3)
