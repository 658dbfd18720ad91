"""Weights of 8 bits that others stored are read as what they stand for."""

import shutil
from pathlib import Path
from typing import Any

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import load_target, open_target
from tests.checkpoints.folders import SINGLE, change_config, take_weights
from tests.helpers import refused

_BLOCK = (16, 24)  # Of matrices of 32 and 48 columns: some blocks are cut short.
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
_LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": _BLOCK}, "_scale_inv"),
    "rows": ({"quant_method": "fbgemm_fp8"}, "_scale"),
    "one": (_COMPRESSED, "_scale"),
    "int8 rows": (_COMPRESSED | {"format": "int-quantized"}, "_scale"),
}


def scales_of(layout: str, shape: tuple[int, ...]) -> np.ndarray:
    sizes = {"blocks": _BLOCK, "one": shape}.get(layout, (1, shape[1]))
    counts = [-(-n // size) for n, size in zip(shape, sizes, strict=True)]
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, counts).astype(np.float32)
    return numbers / (64 if "int8" in layout else 4)


def spread(scales: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    sizes = {"blocks": _BLOCK, "one": shape}.get(layout, (1, shape[1]))
    return np.kron(scales, np.ones(sizes, np.float32))[: shape[0], : shape[1]]


@pytest.mark.filterwarnings("ignore:.* holds weights of 8 bits")
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_the_weights_are_products_with_their_scales(
    target: Path, tmp_path: Path, layout: str
) -> None:
    config, suffix = _LAYOUTS[layout]
    kind: Any = np.int8 if "int8" in layout else ml_dtypes.float8_e4m3fn
    stored, plain = load_file(target / SINGLE), {}
    for name, tensor in list(stored.items()):
        plain[name] = tensor
        if "_proj" in name:
            scales = scales_of(layout, tensor.shape)
            wide = spread(scales, layout, tensor.shape)
            stored[name] = (tensor / wide).astype(kind)
            stored[name + suffix] = scales
            stored[name.replace("weight", "input_scale")] = np.ones(1, np.float32)
            plain[name] = stored[name].astype(np.float32) * wide
    whole = Path(shutil.copytree(target, tmp_path / "whole"))
    for folder, tensors in ((whole, plain), (target, stored)):
        (folder / SINGLE).unlink()
        save_file(tensors, folder / SINGLE)
    change_config(target, quantization_config=config)
    with pytest.warns(UserWarning, match="not read, as only weights are .* and 4 more"):
        chex.assert_trees_all_equal(load_target(target), load_target(whole))
    name = "model.layers.0.mlp.up_proj.weight"
    part = open_target(target)[1].read(name, ((5, 40), (7, 31)))
    np.testing.assert_array_equal(part, plain[name][5:40, 7:31])
    # Without the field nothing says that these are no weights as they stand.
    change_config(target, quantization_config=None)
    refused(lambda: load_target(target), str(target))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        (_COMPRESSED | {"format": "pack-quantized"}, "is not read"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ([4], "quant_method None"),
        (_COMPRESSED | {"transform_config": {"R1": {}}}, "transform_config"),
    ],
)
def test_what_is_quantized_otherwise_is_refused_by_name(
    target: Path, config: Any, named: str
) -> None:
    change_config(target, quantization_config=config)
    refused(lambda: load_target(target), str(target), named)


@pytest.mark.filterwarnings("ignore:.* holds weights of 8 bits")
def test_scales_that_are_missing_or_do_not_fit_are_named(target: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_config(target, quantization_config={"quant_method": "fbgemm_fp8"})
    stored = take_weights(target)
    stored[name] = np.ones((48, 32), ml_dtypes.float8_e4m3fn)
    save_file(stored, target / SINGLE)
    refused(lambda: load_target(target), str(target), name, "no scales")
    stored[f"{name}_scale"] = np.ones((7, 1), np.float32)
    save_file(stored, target / SINGLE)
    refused(lambda: load_target(target), name, "(7, 1)", "(48, 1)")
