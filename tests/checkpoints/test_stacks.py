"""The experts of a layer are one stack, however files hold them; so are q, k and v."""

import functools
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle_jax.checkpoints import load_target, open_target, tensors
from eagle_jax.models.quantized import quantize
from eagle_jax.models.transformer import TransformerParams
from examples.embedded_pair.export_target import export_target
from tests import tiny
from tests.checkpoints.folders import (
    SINGLE,
    change_config,
    change_weights,
    take_weights,
)
from tests.helpers import refused

_CONFIG = tiny.target_config(
    qk_norm=True, num_experts=3, experts_per_token=2, expert_size=20
)
_EXPERTS = "model.layers.0.mlp.experts"
_STACK = f"{_EXPERTS}.{{}}.gate_proj.weight"


@pytest.fixture(scope="module")
def params() -> TransformerParams:
    return tiny.random_target(_CONFIG)


@pytest.fixture
def folder(params: TransformerParams, tmp_path: Path) -> Path:
    """A target in the published layout of Qwen3-MoE."""
    export_target(tmp_path / "target", _CONFIG, params)
    return tmp_path / "target"


def test_a_stack_is_filled_from_the_blocks_of_its_experts(
    folder: Path, params: TransformerParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    chex.assert_trees_all_equal(load_target(folder)[1], params)
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", 300)  # A few rows of an expert.
    chex.assert_trees_all_equal(load_target(folder)[1], params)


def test_a_part_of_a_stack_is_a_slice_of_it(folder: Path) -> None:
    files = open_target(folder)[1]
    whole = files.read(_STACK)
    assert files.shape(_STACK) == whole.shape == (3, 20, 32)
    part = files.read(_STACK, ((1, 3), (5, 9), (30, 32)))
    np.testing.assert_array_equal(part, whole[1:3, 5:9, 30:])
    with ThreadPoolExecutor(2) as readers:  # As a device reads the experts it holds.
        kept = tensors.read_blocks(
            functools.partial(files.read, _STACK),
            ((1, 3), (30, 32), (5, 9)),
            whole.dtype,
            readers,
            is_transposed=True,
        )
    np.testing.assert_array_equal(kept, part.swapaxes(1, 2))


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_are_quantized_one_by_one(
    folder: Path, params: TransformerParams, bits: int
) -> None:
    found: Any = load_target(folder, bits=bits)[1].layers[0].mlp
    wide: Any = params.layers[0].mlp
    for number in range(3):
        expected = jax.jit(quantize, static_argnums=1)(wide.experts.gate[number], bits)
        gate = found.experts.gate
        np.testing.assert_array_equal(gate.values[number], expected.values)
        np.testing.assert_array_equal(gate.scales[number], expected.scales)
    chex.assert_trees_all_equal(found.router, wide.router)


@pytest.mark.filterwarnings("ignore:.* holds weights of 8 bits")
def test_experts_of_eight_bits_are_products_with_their_scales(folder: Path) -> None:
    stored, plain = take_weights(folder), {}
    for name, tensor in list(stored.items()):
        plain[name] = tensor
        if ".experts." in name:
            scales = np.linspace(0.5, 1.5, tensor.shape[0])[:, None].astype("float32")
            stored[name] = (tensor / scales).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            plain[name] = stored[name].astype("float32") * scales
    save_file(plain, folder / SINGLE)
    expected = load_target(folder)[1]
    (folder / SINGLE).unlink()
    save_file(stored, folder / SINGLE)
    scheme = {"quant_method": "fp8", "weight_block_size": [1, 128]}
    change_config(folder, quantization_config=scheme)
    chex.assert_trees_all_equal(load_target(folder)[1], expected)


@pytest.mark.parametrize(
    ("number", "tensor", "named"),
    [
        (1, None, "experts.1.gate_proj.weight is missing"),
        (2, None, "has shape (2, 20, 32), but its sizes ask for (3, 20, 32)"),
        (1, np.ones((20, 16), "float32"), "experts.1.gate_proj.weight has shape"),
    ],
)
def test_experts_that_do_not_fit_are_refused_by_name(
    folder: Path, number: int, tensor: np.ndarray | None, named: str
) -> None:
    name = _STACK.format(number)
    change_weights(folder, **{name.replace(".", "__"): tensor})
    refused(lambda: load_target(folder), str(folder), named)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A gpt-oss whose experts are MXFP4, and in `wide` as transformers reads them."""
    import torch
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64}
    sizes |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    model.save_pretrained(tmp_path / "wide")
    shutil.copytree(tmp_path / "wide", tmp_path / "packed")
    rng = np.random.default_rng(0)
    stored, packed = (take_weights(tmp_path / name) for name in ("wide", "packed"))
    for name in [name for name in stored if name.endswith("_proj")]:
        experts, rows, columns = packed.pop(name).shape
        size = (experts, columns, rows // 32)
        both = rng.integers(256, size=(*size, 16)), rng.integers(118, 126, size=size)
        both = [x.astype(np.uint8) for x in both]
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = both
        wide = convert_moe_packed_tensors(*map(torch.from_numpy, both))
        stored[name] = wide.float().numpy().astype(ml_dtypes.bfloat16)
    save_file(stored, tmp_path / "wide" / SINGLE)
    save_file(packed, tmp_path / "packed" / SINGLE)
    change_config(tmp_path / "packed", quantization_config={"quant_method": "mxfp4"})
    return tmp_path / "packed"


@pytest.mark.torch
def test_four_bits_are_what_transformers_takes_them_for(packed: Path) -> None:
    wide = packed.parent / "wide"
    for bits in (None, 8, 4):
        found, expected = (load_target(x, bits=bits)[1] for x in (packed, wide))
        chex.assert_trees_all_equal(found, expected)
    for part in (((1, 3), (5, 9), (40, 45)), ((0, 1), (90, 96), (0, 64))):
        one, other = (open_target(x)[1].read(_STACK, part) for x in (packed, wide))
        np.testing.assert_array_equal(one, other.astype(np.float32))


@pytest.mark.torch
def test_fused_experts_that_do_not_fit_are_refused_by_name(packed: Path) -> None:
    for name, shape, named in (
        ("gate_up_proj_bias", (3, 193), "gate_proj.bias has shape (3, 97)"),
        ("gate_up_proj_scales", (3, 192, 3), "its scales have (3, 192, 3)"),
    ):
        place = f"{_EXPERTS}.{name}".replace(".", "__")
        change_weights(packed, **{place: np.ones(shape, np.uint8)})
        refused(lambda: load_target(packed), str(packed), named)


@pytest.mark.filterwarnings("ignore:.* holds weights of 8 bits")
def test_joined_matrices_are_read_as_their_parts(
    tiny_pair: Path, tmp_path: Path
) -> None:
    """Here of 8 bits, with a scale for each row; `test_parity` has others."""
    folder = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    plain, joined, parted = take_weights(folder), {}, []
    for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        whole = f"model.layers.0.{whole}_proj.weight"
        names = [re.sub(r"\.\w+_proj", f".{part}_proj", whole) for part in parts]
        matrix = np.concatenate([plain[name] for name in names])
        scales = np.linspace(0.5, 1.5, len(matrix))[:, None].astype("float32")
        narrow = (matrix / scales).astype(ml_dtypes.float8_e4m3fn)
        parted += names
        joined |= {whole: narrow, f"{whole}_scale": scales}
        ends = np.cumsum([len(plain[name]) for name in names])[:-1]
        wide = np.split(narrow.astype("float32") * scales, ends)
        plain |= dict(zip(names, wide, strict=True))
    save_file(plain, folder / SINGLE)
    expected = load_target(folder)[1]
    rest = {name: x for name, x in take_weights(folder).items() if name not in parted}
    save_file(rest | joined, folder / SINGLE)
    change_config(folder, quantization_config={"quant_method": "fbgemm_fp8"})
    chex.assert_trees_all_equal(load_target(folder)[1], expected)
    change_config(folder, num_attention_heads=8, head_dim=8)
    refused(lambda: load_target(folder), "self_attn.qkv_proj.weight", "ask for 96 rows")
