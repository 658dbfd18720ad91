import dataclasses
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import load_file

from eagle_jax.checkpoints import (
    atomic,
    export,
    export_head,
    export_target,
    head_config,
    load_head,
    load_target,
    read_head,
    stop_tokens,
    stored_dtype,
)
from eagle_jax.errors import InputError
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig
from tests.helpers import SMALL_LAYER

_VOCABULARY = 64
_CONFIG = EagleHeadConfig(layer=SMALL_LAYER, vocab_size=_VOCABULARY, max_positions=128)
_TARGET = TransformerConfig(
    layer=SMALL_LAYER, num_layers=2, vocab_size=_VOCABULARY, max_positions=128
)
_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_LLAMA3 = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.5,
    high_freq_factor=5.0,
    original_max_positions=64,
)
_ROPES = [
    RopeConfig(theta=10000.0),
    RopeConfig(theta=5e5),
    RopeConfig(theta=1e4, kind="linear", factor=2.5),
    _LLAMA3,
]


def _random(shapes: Any, dtype: str = "float32") -> Any:
    """Weights of these shapes, none of them zero or one."""
    rng = np.random.default_rng(7)

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        weights = rng.normal(size=shape.shape) * 0.3
        return jax.device_put(weights.astype(np.float32).astype(dtype))

    return jax.tree.map(draw, shapes)


def _head(config: EagleHeadConfig = _CONFIG, dtype: str = "float32") -> EagleHeadParams:
    return _random(
        jax.eval_shape(
            lambda key: eagle_head.init_params(key, config), jax.random.key(0)
        ),
        dtype,
    )


def _target(config: TransformerConfig = _TARGET, dtype: str = "float32") -> Any:
    return _random(
        jax.eval_shape(
            lambda key: transformer.init_params(key, config), jax.random.key(0)
        ),
        dtype,
    )


def _table(dtype: str = "float32") -> jax.Array:
    return _random(
        jax.ShapeDtypeStruct((_VOCABULARY, SMALL_LAYER.hidden_size), jnp.float32), dtype
    )


def _bin(folder: Path) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _refusal(act: Callable[[], object], *named: str) -> None:
    """Checks that this is refused in one line that names all of these."""
    with pytest.raises(InputError) as error:
        act()
    message = str(error.value)
    assert "\n" not in message
    for name in named:
        assert name in message


def _fail(error: BaseException) -> Callable[..., None]:
    """A function that raises, whatever it is called with."""

    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_head_has_the_names_and_shapes_of_the_published_ones(
    tmp_path: Path, kv_heads: int, qkv_bias: bool, fc_bias: bool, has_table: bool
) -> None:
    layer = dataclasses.replace(SMALL_LAYER, num_kv_heads=kv_heads, qkv_bias=qkv_bias)
    config = dataclasses.replace(_CONFIG, layer=layer, fc_bias=fc_bias)
    width, inner, kv_width = 32, 48, kv_heads * 8
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    expected = {
        "fc.weight": (width, 2 * width),
        f"{attention}.q_proj.weight": (width, width),
        f"{attention}.k_proj.weight": (kv_width, width),
        f"{attention}.v_proj.weight": (kv_width, width),
        f"{attention}.o_proj.weight": (width, width),
        f"{mlp}.gate_proj.weight": (inner, width),
        f"{mlp}.up_proj.weight": (inner, width),
        f"{mlp}.down_proj.weight": (width, inner),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    if fc_bias:
        expected["fc.bias"] = (width,)
    if qkv_bias:
        expected[f"{attention}.q_proj.bias"] = (width,)
        expected[f"{attention}.k_proj.bias"] = (kv_width,)
        expected[f"{attention}.v_proj.bias"] = (kv_width,)
    if has_table:
        expected["embed_tokens.weight"] = (_VOCABULARY, width)
    params = _head(config)
    export_head(
        tmp_path / "head", config, params, embedding=_table() if has_table else None
    )
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in stored.items()} == expected
    stored = _bin(tmp_path / "head")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected

    read_config, read = read_head(tmp_path / "head")
    assert read_config == config
    wanted = dataclasses.replace(params, embedding=_table() if has_table else None)
    chex.assert_trees_all_equal(read, wanted)


def test_the_settings_of_a_head_are_those_that_the_official_code_reads(
    tmp_path: Path,
) -> None:
    layer = dataclasses.replace(SMALL_LAYER, rope=_ROPES[2])
    config = dataclasses.replace(_CONFIG, layer=layer, fc_bias=False)
    export_head(tmp_path / "head", config, _head(config), dtype="bfloat16")
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": False,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.5},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "written_by": "eagle_jax",
    }


def test_qkv_bias_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    # The official code asks whether the field is there.
    layer = dataclasses.replace(SMALL_LAYER, qkv_bias=True)
    config = dataclasses.replace(_CONFIG, layer=layer)
    export_head(tmp_path / "with", config, _head(config))
    export_head(tmp_path / "without", _CONFIG, _head())
    settings = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("with", "without")
    ]
    assert settings[0]["qkv_bias"] is True
    assert "qkv_bias" not in settings[1]


@pytest.mark.parametrize("rope", _ROPES, ids=["default", "base", "linear", "llama3"])
def test_every_rotary_embedding_is_read_back_as_it_was(
    tmp_path: Path, rope: RopeConfig
) -> None:
    layer = dataclasses.replace(SMALL_LAYER, rope=rope, rms_norm_eps=1e-6)
    config = dataclasses.replace(_CONFIG, layer=layer, max_positions=2048)
    export_head(tmp_path / "head", config, _head(config), with_bin=False)
    assert head_config(tmp_path / "head") == config
    target = dataclasses.replace(_TARGET, layer=layer)
    export_target(tmp_path / "target", target, _target(target))
    assert load_target(tmp_path / "target")[0] == target


def test_a_head_without_a_table_is_read_with_its_targets(tmp_path: Path) -> None:
    target_params = _target()
    params = _head()
    export_head(tmp_path / "with", _CONFIG, params, embedding=target_params.embedding)
    export_head(tmp_path / "without", _CONFIG, params)
    for name in ("with", "without"):
        read = load_head(tmp_path / name, _TARGET, target_params)[1]
        chex.assert_trees_all_equal(read, params)


def test_a_heads_own_table_is_written_before_the_targets(tmp_path: Path) -> None:
    own = _table() + 1
    params = dataclasses.replace(_head(), embedding=own)
    export_head(tmp_path / "head", _CONFIG, params, embedding=_table())
    np.testing.assert_array_equal(read_head(tmp_path / "head")[1].embedding, own)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_load_export_gives_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("torch")
    params = dataclasses.replace(_head(dtype=dtype), embedding=_table(dtype))
    export_head(tmp_path / "one", _CONFIG, params, dtype=dtype)
    config, read = read_head(tmp_path / "one")
    chex.assert_trees_all_equal(read, params)
    export_head(tmp_path / "another name", config, read, dtype=dtype)
    first = _bytes(tmp_path / "one")
    assert sorted(first) == sorted(_FILES)
    assert _bytes(tmp_path / "another name") == first
    # safetensors writes several entries in an order that varies by chance.
    with safetensors.safe_open(tmp_path / "one" / _FILES[1], framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert stored_dtype(tmp_path / "one") == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    params = _head()
    export_head(tmp_path / "head", _CONFIG, params, dtype=dtype)
    rounded = jax.tree.map(lambda x: x.astype(dtype), params)
    chex.assert_trees_all_equal(read_head(tmp_path / "head")[1], rounded)
    stored = _bin(tmp_path / "head")["fc.weight"]
    assert str(stored.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(
        stored.float().numpy(), np.asarray(rounded.fc.astype("float32")).T
    )


def test_the_shared_head_is_exported_as_it_was_published(
    shared: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    source = shared / "models" / "stories260K-eagle"
    export_head(tmp_path / "head", *read_head(source))
    published, exported = _bin(source), _bin(tmp_path / "head")
    assert exported.keys() == published.keys()
    for name, tensor in published.items():
        assert tensor.dtype == exported[name].dtype
        assert torch.equal(tensor, exported[name])
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "head", source)
    )
    chex.assert_trees_all_equal(ours, theirs)
    fields = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    common = fields.keys() & written.keys()
    assert {name: fields[name] for name in common} == {
        name: written[name] for name in common
    }


def _transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize(
    "kind", ["plain", "llama3 and tied", "linear and wide heads", "window"]
)
def test_transformers_computes_the_same_from_an_exported_target(
    tmp_path: Path, kind: str
) -> None:
    layer, fields = SMALL_LAYER, {}
    if kind == "llama3 and tied":
        layer = dataclasses.replace(layer, rope=_LLAMA3)
        fields["tie_embeddings"] = True
    if kind == "linear and wide heads":
        layer = dataclasses.replace(layer, rope=_ROPES[2], head_dim=16)
    if kind == "window":
        fields["sliding_window"] = 64
    config = dataclasses.replace(_TARGET, layer=layer, **fields)
    params = _target(config)
    folder = tmp_path / "target"
    export_target(folder, config, params, stop_tokens=(2,), bos_token=1)

    read_config, read = load_target(folder)
    assert read_config == config
    chex.assert_trees_all_equal(read, params)
    ids = [1, 17, 4, 63, 9, 9, 30]
    model = transformer.Transformer(config=config)
    output = model.forward(
        params,
        jnp.array([ids]),
        jnp.arange(len(ids))[None],
        None,
        model.init_cache(1, 0),
    )
    ours = model.unembed(params, output.hidden)[0]
    theirs = _transformers_logits(folder, ids)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_targets_are_exported_with_the_same_bytes_again(tmp_path: Path) -> None:
    export_target(
        tmp_path / "one", _TARGET, _target(dtype="bfloat16"), dtype="bfloat16"
    )
    config, params = load_target(tmp_path / "one", None)
    chex.assert_trees_all_equal(params, _target(dtype="bfloat16"))
    export_target(tmp_path / "two", config, params, dtype="bfloat16")
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")


def test_targets_name_what_ends_a_text(tmp_path: Path) -> None:
    export_target(tmp_path / "one", _TARGET, _target(), stop_tokens=(5, 9))
    assert stop_tokens(tmp_path / "one") == (5, 9)


def test_the_caller_adds_a_tokenizer_before_a_target_appears(tmp_path: Path) -> None:
    folder = tmp_path / "target"

    def add(unfinished: Path) -> None:
        assert not folder.exists()
        (unfinished / "tokenizer.json").write_text("{}")

    export_target(folder, _TARGET, _target(), also=add)
    assert (folder / "tokenizer.json").read_text() == "{}"
    export_target(folder, _TARGET, _target(), overwrite=True)
    assert sorted(_bytes(folder)) == ["config.json", "model.safetensors"]


def test_what_the_layouts_cannot_express_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    wide = dataclasses.replace(SMALL_LAYER, head_dim=16)
    config = dataclasses.replace(_CONFIG, layer=wide)
    _refusal(lambda: export_head(folder, config, _head(config)), "head_dim", "width 16")
    biased = dataclasses.replace(
        _TARGET, layer=dataclasses.replace(SMALL_LAYER, qkv_bias=True)
    )
    _refusal(lambda: export_target(folder, biased, _target(biased)), "biases")
    # Fields that no kind of rotary embedding reads would come back as their defaults.
    rope = dataclasses.replace(SMALL_LAYER.rope, factor=3.0)
    odd = dataclasses.replace(
        _CONFIG, layer=dataclasses.replace(SMALL_LAYER, rope=rope)
    )
    _refusal(lambda: export_head(folder, odd, _head(odd)), "would be read as")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: dataclasses.replace(p, fc_bias=None), "lack fc.bias"),
        (lambda p: dataclasses.replace(p, fc=p.fc[1:]), "(32, 63)"),
        (lambda p: dataclasses.replace(p, embedding=p.fc.T), "embed_tokens.weight"),
        (lambda p: dataclasses.replace(p, fc=p.fc.at[3, 4].set(jnp.nan)), "NaN"),
    ],
)
def test_weights_that_are_no_head_are_refused(
    tmp_path: Path, change: Callable[[EagleHeadParams], EagleHeadParams], named: str
) -> None:
    params = change(_head())
    _refusal(lambda: export_head(tmp_path / "head", _CONFIG, params), named)
    assert not list(tmp_path.iterdir())


def test_unexpected_weights_are_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(_CONFIG, fc_bias=False)
    _refusal(
        lambda: export_head(tmp_path / "head", config, _head()), "unexpected fc.bias"
    )


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    params = _head()
    params = dataclasses.replace(params, fc=params.fc.at[0, 0].set(1e5))
    folder = tmp_path / "head"
    _refusal(
        lambda: export_head(folder, _CONFIG, params, dtype="float16"),
        "fc.weight",
        "float16 cannot hold",
    )
    _refusal(lambda: export_head(folder, _CONFIG, params, dtype="int8"), "'int8'")
    assert not list(tmp_path.iterdir())


def test_without_torch_there_is_no_torch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    export_head(tmp_path / "head", _CONFIG, _head())
    assert sorted(_bytes(tmp_path / "head")) == ["config.json", "model.safetensors"]
    _refusal(
        lambda: export_head(tmp_path / "other", _CONFIG, _head(), with_bin=True),
        "pytorch_model.bin",
        "torch extra",
    )
    assert not (tmp_path / "other").exists()


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    export_head(folder, _CONFIG, _head())
    before = _bytes(folder)
    _refusal(
        lambda: export_head(folder, _CONFIG, _head(), dtype="float16"),
        str(folder),
        "exists already",
    )
    assert _bytes(folder) == before
    export_head(folder, _CONFIG, _head(), dtype="float16", overwrite=True)
    assert stored_dtype(folder) == "float16"
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_empty_folder_may_be_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    _refusal(lambda: export_head(folder, _CONFIG, _head()), "exists already")
    export_head(folder, _CONFIG, _head(), overwrite=True)
    assert read_head(folder)[0] == _CONFIG


def test_a_link_to_an_export_stays_a_link(tmp_path: Path) -> None:
    export_head(tmp_path / "real", _CONFIG, _head())
    (tmp_path / "link").symlink_to("real")
    export_head(tmp_path / "link", _CONFIG, _head(), dtype="bfloat16", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert stored_dtype(tmp_path / "real") == "bfloat16"


@pytest.mark.parametrize("kind", ["notes", "a folder", "someone else's", "no JSON"])
def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "head"
    export_head(folder, _CONFIG, _head())
    settings = folder / "config.json"
    if kind == "notes":
        (folder / "notes.txt").write_text("do not lose me")
    elif kind == "a folder":
        (folder / "tokenizer.json").mkdir()
    elif kind == "someone else's":
        settings.write_text(settings.read_text().replace("eagle_jax", "somebody"))
    else:
        settings.write_text("{")
    before = sorted(path.name for path in folder.iterdir())
    _refusal(
        lambda: export_head(folder, _CONFIG, _head(), overwrite=True),
        str(folder),
        "holds something else",
    )
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_place_that_no_folder_can_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for name, why in [
        ("file", "it is no folder"),
        ("nowhere/head", "nowhere is no folder"),
        ("file/head", "file is no folder"),
    ]:
        _refusal(
            lambda name=name: export_head(
                tmp_path / name, _CONFIG, _head(), overwrite=True
            ),
            str(tmp_path / name),
            why,
        )
    assert (tmp_path / "file").read_text() == "text"


_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("writer", "error", "named"),
    [
        ("pathlib.Path.write_text", _FULL, "No space left on device"),
        ("pathlib.Path.mkdir", _FULL, "No space left on device"),
        (
            "safetensors.numpy.save_file",
            safetensors.SafetensorError("I/O error: No space left on device (28)"),
            ": No space left on device;",
        ),
        (
            "torch.save",
            RuntimeError("unexpected pos 576 vs 534"),
            "pytorch_model.bin failed (unexpected pos 576 vs 534); is the disk full?",
        ),
        ("os.fsync", _FULL, "No space left on device"),
    ],
)
def test_a_full_disk_is_told_in_one_line_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: str,
    error: Exception,
    named: str,
) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "head"
    export_head(folder, _CONFIG, _head())
    before = _bytes(folder)
    monkeypatch.setattr(writer, _fail(error))
    for path in (folder, tmp_path / "other"):
        _refusal(
            lambda path=path: export_head(
                path, _CONFIG, _head(), dtype="float16", overwrite=True
            ),
            f"cannot write {path}: ",
            named,
            "nothing was written",
        )
    assert _bytes(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_what_the_disk_cannot_take_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(_head()))
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * num_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(export, "_write", _fail(AssertionError("it was begun")))
    _refusal(
        lambda: export_head(tmp_path / "head", _CONFIG, _head(), with_bin=True),
        f"{2 * num_bytes:,} bytes are needed",
        f"{usage.free:,} are free",
    )
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_check", _fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        export_head(tmp_path / "head", _CONFIG, _head())
    assert not list(tmp_path.iterdir())


def test_what_reads_back_differently_never_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    save_torch, save_numpy = torch.save, safetensors.numpy.save_file

    def negate(tensors: dict[str, Any], *names: str) -> dict[str, Any]:
        return tensors | {name: -tensors[name] for name in names}

    def save_wrong_bin(tensors: dict[str, Any], path: Path) -> None:
        save_torch(negate(tensors, "fc.bias"), path)

    def save_wrong(tensors: dict[str, Any], path: Path, **fields: Any) -> None:
        save_numpy(negate(tensors, "fc.bias"), path, **fields)

    folder = tmp_path / "head"
    # Negative zero equals zero, but not in its bits.
    params = dataclasses.replace(_head(), fc_bias=jnp.zeros(32))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save_wrong_bin)
        _refusal(
            lambda: export_head(folder, _CONFIG, params), "pytorch_model.bin reads"
        )
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", save_wrong)
        _refusal(
            lambda: export_head(folder, _CONFIG, params), "model.safetensors reads"
        )
    assert not list(tmp_path.iterdir())


def test_the_old_folder_comes_back_where_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "head"
    export_head(folder, _CONFIG, _head())
    before = _bytes(folder)
    rename = Path.rename

    def refuse_new(path: Path, name: Path) -> Path:
        if path.suffix == ".unfinished":
            raise _FULL
        return rename(path, name)

    monkeypatch.setattr(Path, "rename", refuse_new)
    _refusal(
        lambda: export_head(folder, _CONFIG, _head(), dtype="float16", overwrite=True),
        "No space left",
    )
    assert _bytes(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_the_old_folder_is_whole_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "head"
    export_head(folder, _CONFIG, _head())
    deleted = []
    remove = shutil.rmtree

    def check_and_remove(path: Path, **fields: Any) -> None:
        if path.exists():
            deleted.append(path.suffix)
            assert stored_dtype(folder) == "float16"
            assert read_head(path)[0] == read_head(folder)[0]
        remove(path, **fields)

    monkeypatch.setattr(atomic.shutil, "rmtree", check_and_remove)
    export_head(folder, _CONFIG, _head(), dtype="float16", overwrite=True)
    assert deleted == [".replaced"]


def test_files_that_appear_meanwhile_are_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    export_target(folder, _TARGET, _target())

    def somebody_writes(_: Path) -> None:
        (folder / "notes.txt").write_text("do not lose me")

    _refusal(
        lambda: export_target(
            folder, _TARGET, _target(), also=somebody_writes, overwrite=True
        ),
        "holds something else",
    )
    assert (folder / "notes.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_exported_files_have_the_permissions_of_ordinary_ones(tmp_path: Path) -> None:
    export_head(tmp_path / "head", _CONFIG, _head())
    (tmp_path / "ordinary").write_text("")
    ordinary = (tmp_path / "ordinary").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "head").iterdir()} == {ordinary}
