"""A target in a GGUF file is the one that Hugging Face's files hold."""

import random
from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import (
    load_target,
    open_target,
    resolve,
    stop_tokens,
    stored_dtype,
)
from eagle_jax.checkpoints.hf_config import target_config
from eagle_jax.checkpoints.load import target_shapes
from eagle_jax.checkpoints.names import (
    GEMMA,
    TRANSFORMER,
    by_name,
    is_transposed,
    transposed,
)
from eagle_jax.errors import InputError
from eagle_jax.models.rope import inverse_frequencies
from eagle_jax.models.transformer import Transformer, TransformerConfig
from tests.checkpoints.gguf_files import gguf, write_gguf
from tests.checkpoints.settings import write
from tests.helpers import refused

_HF: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
_GGUF: dict[str, Any] = {
    ".context_length": 1024,
    ".embedding_length": 64,
    ".block_count": 2,
    ".feed_forward_length": 96,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".rope.freq_base": 5e5,
}
_WIDE = {".attention.key_length": 32, ".attention.value_length": 32}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_GGUF_YARN = {
    ".rope.scaling.type": "yarn",
    ".rope.scaling.factor": 4.0,
    ".rope.scaling.original_context_length": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LAYER = "model.layers.0.self_attn"
_SHORT, _LONG = [1.0, 1.5, 4.0, 5.0], [2.0, 3.0, 9.0, 11.0]
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 24,
    "tie_word_embeddings": True,
}
_GGUF_GEMMA = _WIDE | {".attention.sliding_window": 24}


def _hf(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return _HF | {"architectures": [f"{name}ForCausalLM"], "model_type": kind} | more


# What both kinds of files say of a model of each architecture.
_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "llama",
        _hf("Llama", "llama"),
        {".rope.dimension_count": 16, ".vocab_size": 96},
    ),
    "llama, tied": ("llama", _hf("Llama", "llama", tie_word_embeddings=True), {}),
    "llama, linear": (
        "llama",
        _hf("Llama", "llama", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0},
    ),
    "mistral": (
        "llama",
        _hf("Mistral", "mistral", sliding_window=24),
        {".attention.sliding_window": 24},
    ),
    "qwen2": ("qwen2", _hf("Qwen2", "qwen2"), {}),
    "qwen2, yarn": ("qwen2", _hf("Qwen2", "qwen2", rope_scaling=_YARN), _GGUF_YARN),
    "qwen3": ("qwen3", _hf("Qwen3", "qwen3", head_dim=32), _WIDE),
    "qwen3moe": (
        "qwen3moe",
        _hf(
            "Qwen3Moe",
            "qwen3_moe",
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
        {
            **_WIDE,
            ".expert_count": 4,
            ".expert_used_count": 2,
            ".expert_feed_forward_length": 32,
        },
    ),
    "gemma2": (
        "gemma2",
        _hf("Gemma2", "gemma2", **_GEMMA),
        {
            **_GGUF_GEMMA,
            ".attn_logit_softcapping": 50.0,
            ".final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": ("gemma3", _hf("Gemma3", "gemma3_text", **_GEMMA), _GGUF_GEMMA),
    "phi3": (
        "phi3",
        _hf("Phi3", "phi3", sliding_window=24, partial_rotary_factor=0.5),
        {".rope.dimension_count": 8, ".attention.sliding_window": 24},
    ),
    "gpt-oss": (
        "gpt-oss",
        _hf(
            "GptOss",
            "gpt_oss",
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=24,
            rope_scaling=_YARN | {"truncate": False},
        ),
        {
            **_WIDE,
            **_GGUF_YARN,
            ".attention.sliding_window": 24,
            ".expert_count": 4,
            ".expert_used_count": 2,
            ".expert_feed_forward_length": 96,
        },
    ),
}


def _weights(config: TransformerConfig) -> dict[str, np.ndarray]:
    """Random tensors of a model by Hugging Face's names, in their order of axes."""
    table = GEMMA if config.layer.output_norms else TRANSFORMER
    rng, found = np.random.default_rng(3), {}
    for name, leaf in by_name(target_shapes(config, None), table).items():
        shape = leaf.shape
        if len(shape) > 1 and is_transposed(name):
            shape = transposed(shape)
        # Eighths, so that adding one to a norm and taking it away changes nothing.
        found[name] = rng.integers(-9, 10, size=shape).astype(np.float32) / 8
    return found


def _joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of Phi-3 as its files hold them."""
    found, parts = dict(tensors), ("qkv", "gate_up")
    for number in range(2):
        layer = f"model.layers.{number}"
        for whole, inner in zip(parts, ("self_attn", "mlp"), strict=True):
            names = whole if whole == "qkv" else whole.split("_")
            ones = [found.pop(f"{layer}.{inner}.{x}_proj.weight") for x in names]
            found[f"{layer}.{inner}.{whole}_proj.weight"] = np.concatenate(ones)
    return found


def _model(
    folder: Path, key: str
) -> tuple[TransformerConfig, dict[str, np.ndarray], Path]:
    """A model's sizes by Hugging Face's settings, its weights, and its GGUF file."""
    arch, config, fields = _MODELS[key]
    (folder / "hf").mkdir()
    sizes = target_config(write(folder / "hf", config))
    tensors = _weights(sizes)
    stored = _joined(tensors) if arch == "phi3" else tensors
    path = write_gguf(folder / "model.gguf", stored, _GGUF | fields, arch)
    return sizes, tensors, path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which is made anew for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("key", _MODELS)
@pytest.mark.filterwarnings("ignore:.*names no rope_theta")
def test_sizes_and_weights_are_those_of_hugging_faces_files(
    key: str, tmp_path: Path
) -> None:
    wanted, tensors, path = _model(tmp_path, key)
    config, params = load_target(resolve(str(path)), "float32")
    assert config == wanted
    table = GEMMA if config.layer.output_norms else TRANSFORMER
    found = by_name(params, table)
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        stored = tensors[name]
        if stored.ndim > 1 and is_transposed(name):
            stored = stored.swapaxes(-1, -2)
        np.testing.assert_array_equal(array, stored, err_msg=name)


def test_llama_3s_stretched_frequencies_are_read_from_their_tensor(
    tmp_path: Path,
) -> None:
    """llama.cpp's files hold what its converter computed, and none of its settings."""
    config = _hf("Llama", "llama", rope_scaling=_LLAMA3)
    wanted = target_config(write(tmp_path, config))
    plain = 5e5 ** (-np.arange(0, 16, 2) / 16)
    factors = plain / inverse_frequencies(wanted.layer.rope, 16)
    tensors = _weights(wanted) | {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tensors, _GGUF)
    found = target_config(resolve(str(path)))
    assert found.max_positions == wanted.max_positions
    np.testing.assert_allclose(
        inverse_frequencies(found.layer.rope, 16),
        inverse_frequencies(wanted.layer.rope, 16),
        rtol=1e-6,
    )


@pytest.mark.filterwarnings("ignore:.*rope type 'longrope'")
def test_phi_3s_factors_are_read_from_their_tensors(tmp_path: Path) -> None:
    long = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}
    more = {"partial_rotary_factor": 0.5, "sliding_window": 24, "rope_scaling": long}
    config = _hf("Phi3", "phi3", original_max_position_embeddings=256, **more)
    wanted = target_config(write(tmp_path, config))
    ropes = {"short": _SHORT, "long": _LONG}
    tensors = _joined(_weights(wanted)) | {
        f"rope_factors_{name}.weight": np.array(factors, np.float32)
        for name, factors in ropes.items()
    }
    fields = {
        ".rope.dimension_count": 8,
        ".attention.sliding_window": 24,
        ".rope.scaling.original_context_length": 256,
    }
    path = write_gguf(tmp_path / "model.gguf", tensors, _GGUF | fields, "phi3")
    assert target_config(resolve(str(path))) == wanted


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0", "MXFP4"])
def test_blocks_are_read_as_what_they_stand_for(kind: str, tmp_path: Path) -> None:
    config = target_config(write(tmp_path, _MODELS["llama"][1]))
    type_ = gguf.GGMLQuantizationType[kind]
    tensors = _weights(config)
    path = write_gguf(tmp_path / "model.gguf", tensors, _GGUF, kind=type_)
    folder = resolve(str(path))
    assert stored_dtype(folder) == ("float16" if kind == "F16" else "bfloat16")
    found = by_name(load_target(folder, "float32")[1], TRANSFORMER)
    for name, array in found.items():
        stored = tensors[name]
        if stored.ndim > 1:
            stored = gguf.dequantize(gguf.quantize(stored, type_), type_)
        if stored.ndim > 1 and is_transposed(name):
            stored = stored.T
        np.testing.assert_array_equal(array, stored, err_msg=name)


def test_a_part_of_a_permuted_matrix_is_a_slice_of_it(tmp_path: Path) -> None:
    """As a device reads that holds some heads, and some inputs of them."""
    _, tensors, path = _model(tmp_path, "llama")
    files, name = open_target(resolve(str(path)))[1], f"{_LAYER}.q_proj.weight"
    for rows, columns in (((0, 16), (0, 64)), ((5, 37), (3, 9)), ((63, 64), (63, 64))):
        wanted = tensors[name][slice(*rows), slice(*columns)]
        np.testing.assert_array_equal(files.read(name, (rows, columns)), wanted)


def test_parts_and_folders_and_links_are_one_model(tmp_path: Path) -> None:
    """Any part stands for all; the folder that is made is used again."""
    _, tensors, path = _model(tmp_path, "qwen2")
    whole = load_target(resolve(str(path)), "float32")
    home, names = tmp_path / "split", sorted(tensors)
    home.mkdir()
    for number in range(2):
        fields = {"split.no": number, "split.count": 2}
        fields["split.tensors.count"] = len(tensors)
        part = {name: tensors[name] for name in names[number::2]}
        place = home / f"m-0000{number + 1}-of-00002.gguf"
        write_gguf(place, part, _GGUF | fields, "qwen2")
    for given in (home, home / "m-00002-of-00002.gguf"):
        chex.assert_trees_all_equal(load_target(resolve(str(given)), "float32"), whole)
    assert resolve(str(home)) == resolve(str(home / "m-00001-of-00002.gguf"))
    (home / "m-00001-of-00002.gguf").unlink()
    refused(
        lambda: resolve(str(home / "m-00002-of-00002.gguf")),
        "m-00001-of-00002.gguf is not beside it",
    )


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    _, tensors, path = _model(tmp_path, "llama")
    before = resolve(str(path))
    assert resolve(str(path)) == before
    fields = _GGUF | {
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 5,
    }
    write_gguf(path, tensors, fields)
    assert resolve(str(path)) != before
    assert stop_tokens(resolve(str(path))) == (5, 7)


@pytest.mark.parametrize(
    ("fields", "arch", "words"),
    [
        (
            {},
            "mamba",
            "general.architecture = 'mamba' is not supported; known are llama",
        ),
        ({"general.type": "mmproj"}, "clip", "projector of images beside a model"),
        ({"general.type": "adapter"}, "llama", "adapter (LoRA); merge it"),
        ({}, "eagle3", "holds a draft (eagle3), not a target"),
        ({".attention.clamp_kqv": 8.0}, "llama", "llama.attention.clamp_kqv = 8.0"),
        ({".logit_scale": 0.5}, "llama", "llama.logit_scale = 0.5 is not supported"),
        ({".attention.causal": False}, "llama", "attention.causal = False is not"),
        (
            {".rope.scaling.type": "yarn", ".rope.scaling.attn_factor": 2.0},
            "qwen2",
            "rope.scaling.attn_factor = 2.0 is not known",
        ),
        ({".expert_count": 8}, "llama", "num_local_experts = 8 is not supported"),
        ({".rope.scaling.type": "other"}, "llama", "rope.scaling.type = 'other'"),
        (
            {".attention.value_length": 8},
            "llama",
            "keys have a length of 16, and values",
        ),
        (
            {".attention.head_count": 0},
            "llama",
            "attention.head_count = 0 is no number",
        ),
        ({".block_count": 3}, "llama", "the files of weights have fewer"),
        ({"tokenizer.ggml.model": "x"}, "llama", "holds no usable tokenizer"),
    ],
)
def test_what_is_no_target_is_refused_in_a_line(
    fields: dict[str, Any], arch: str, words: str, tmp_path: Path
) -> None:
    config = target_config(write(tmp_path, _MODELS["llama"][1]))
    # Counts of zero would stop the writer.
    asked = _GGUF | fields
    path = write_gguf(tmp_path / "model.gguf", _weights(config), asked, arch)
    refused(lambda: load_target(resolve(str(path))), words)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    _, tensors, path = _model(tmp_path, "llama")
    odd = {"rope_x\x1b[2J.weight": np.zeros((2, 2), np.float32)}
    write_gguf(path, tensors | odd, _GGUF)
    refused(
        lambda: load_target(resolve(str(path))),
        "it holds tensors of another model: rope_x",
    )


def test_a_file_that_is_being_downloaded_says_so(tmp_path: Path) -> None:
    _, _, path = _model(tmp_path, "llama")
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    refused(lambda: resolve(str(path)), "it is cut, or still being downloaded")
    part = path.rename(tmp_path / "model.gguf.part")
    refused(lambda: resolve(str(part)), "is a file that is being downloaded")


@pytest.mark.parametrize("name", ["none.gguf", "no/folder.gguf", "./a/b/c.gguf"])
def test_a_file_that_is_not_there_is_no_name_on_the_hub(name: str) -> None:
    refused(lambda: resolve(name), f"{name} is no file; give", "a GGUF file")


def test_a_file_on_the_hub_is_fetched_with_its_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, path = _model(tmp_path, "llama")
    (tmp_path / "deep").mkdir()
    path.rename(tmp_path / "deep" / "m-00001-of-00001.gguf")
    asked: list[Any] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = resolve("owner/name/deep/m-00001-of-00001.gguf")
    assert target_config(found) == config
    assert asked == [("owner/name", ["deep/m-00001-of-00001.gguf"])]


def test_several_files_in_a_folder_are_told_apart_by_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    refused(
        lambda: resolve(str(tmp_path)),
        "holds several GGUF files; give one of them: a.gguf, b.gguf",
    )


def test_broken_files_are_read_or_refused(tmp_path: Path) -> None:
    """Cut, overwritten with huge counts, odd types and names, and random bytes."""
    _, _, path = _model(tmp_path, "llama")
    content, rng, ends = path.read_bytes(), random.Random(0), {True: 0, False: 0}
    header = content.index(b"output_norm.weight") + 200
    huge = [b"\xff" * 8, b"\xff" * 4, (2**40).to_bytes(8, "little"), b"\x00" * 8]
    for number in range(300):
        broken = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 5])):
            place = rng.randrange(header)
            change = rng.choice([*huge, rng.randbytes(rng.choice([1, 2, 8]))])
            broken[place : place + len(change)] = change
        if number % 5 == 0:
            del broken[rng.randrange(len(broken)) :]
        place = tmp_path / f"{number}.gguf"
        place.write_bytes(broken)
        try:
            load_target(resolve(str(place)))
        except InputError as error:
            ends[False] += 1
            assert len(str(error).splitlines()) == 1
        else:
            ends[True] += 1
        place.unlink()
    assert all(ends.values())


# The width of heads that transformers takes, whatever the file says. It does not read
# the experts of gpt-oss, nor what is called Mistral in a GGUF file, and its Phi-3 has a
# padding token beyond a small vocabulary.
_WIDTHS = {
    "llama": 16,
    "llama, tied": 16,
    "qwen2": 16,
    "qwen3": 128,
    "qwen3moe": 128,
    "gemma2": 256,
    "gemma3": 256,
}


@pytest.mark.torch
@pytest.mark.parametrize("key", _WIDTHS)
def test_logits_are_those_of_transformers_reading_of_the_file(
    key: str, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate")
    arch, settings, fields = _MODELS[key]
    ours = ("head_dim", "query_pre_attn_scalar")
    sizes = dict.fromkeys(ours, _WIDTHS[key]) | {"moe_intermediate_size": 768}
    settings = {name: sizes.get(name, x) for name, x in settings.items()}
    theirs = (".attention.key_length", ".attention.value_length")
    sizes = dict.fromkeys(theirs, _WIDTHS[key]) | {".expert_feed_forward_length": 768}
    fields = {name: sizes.get(name, x) for name, x in fields.items()}
    tensors = _weights(target_config(write(tmp_path, settings)))
    tensors = {name: tensor / 16 for name, tensor in tensors.items()}
    fields = _GGUF | fields | {"general.name": "a model", ".vocab_size": 96}
    path = write_gguf(tmp_path / "model.gguf", tensors, fields, arch)
    judge: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    ids = np.random.default_rng(0).integers(96, size=(1, 60))
    with torch.no_grad():
        wanted = judge(torch.from_numpy(ids)).logits.numpy()
    config, params = load_target(resolve(str(path)), "float32")
    target, places = Transformer(config=config), jnp.arange(60)[None]
    read = target.forward(
        params, jnp.asarray(ids), places, None, target.init_cache(1, 0)
    )
    found = target.unembed(params, read.hidden)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
