"""What each family of targets has, by its name and its settings."""

from pathlib import Path
from typing import Any

import pytest

from eagle_jax.checkpoints import check_max_length, target_config
from eagle_jax.errors import InputError
from eagle_jax.models.layers import LayerConfig
from tests.checkpoints.settings import LLAMA, MISTRAL, without, write
from tests.helpers import refused

_SLIDING = "sliding_attention"


def test_a_window_sets_no_limit_to_the_length(tmp_path: Path) -> None:
    check_max_length(target_config(write(tmp_path, MISTRAL)), 1024)


_SWITCHED = {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("base", "change", "window", "layers"),
    [
        ("mistral", {}, 96, (0, 1, 2, 3, 4)),
        ("mistral", {"sliding_window": None}, None, ()),
        ("mistral", {"layer_types": [_SLIDING] * 5}, 96, (0, 1, 2, 3, 4)),
        (
            "qwen3",
            _SWITCHED | {"layer_types": [_SLIDING, *["full_attention"] * 4]},
            96,
            (0,),
        ),
        ("mixtral", {"sliding_window": None}, None, ()),
        ("mixtral", {"sliding_window": 8}, 8, (0, 1, 2, 3, 4)),
        ("qwen2", {"sliding_window": 96}, None, ()),
        ("qwen2", _SWITCHED, 96, (2, 3, 4)),
        ("qwen2", _SWITCHED | {"max_window_layers": 0}, 96, (0, 1, 2, 3, 4)),
        # As in the published files: 28 of 28 layers see everything.
        ("qwen2", {"use_sliding_window": True, "sliding_window": 96}, None, ()),
        ("qwen3", _SWITCHED | {"use_sliding_window": False}, None, ()),
        ("qwen3", _SWITCHED, 96, (2, 3, 4)),
    ],
)
def test_windows_are_where_the_family_has_them(
    tmp_path: Path,
    base: str,
    change: dict[str, Any],
    window: int | None,
    layers: tuple[int, ...],
) -> None:
    family = {
        "architectures": [f"{base.capitalize()}ForCausalLM"],
        "model_type": base,
    }
    fields = without(MISTRAL, "sliding_window") if base == "mixtral" else MISTRAL
    config = target_config(write(tmp_path, fields | family | change))
    assert (config.sliding_window, config.windowed_layers) == (window, layers)


def test_layer_types_that_contradict_the_family_are_refused(tmp_path: Path) -> None:
    """A Mistral has its window in every layer, whatever its file says."""
    types = {"layer_types": [*["full_attention"] * 4, _SLIDING]}
    refused(
        lambda: target_config(write(tmp_path, MISTRAL | types)),
        "contradicts sliding_window = 96",
    )
    with pytest.raises(InputError, match="each of 5 layers"):
        types = {"layer_types": [None, *["full_attention"] * 4]}
        target_config(write(tmp_path, LLAMA | types))


def test_families_differ_in_biases_norms_and_experts(tmp_path: Path) -> None:
    def layer(base: str, **change: Any) -> LayerConfig:
        name = f"{base.capitalize()}ForCausalLM"
        family = {"architectures": [name], "model_type": base}
        return target_config(write(tmp_path, LLAMA | family | change)).layer

    assert layer("qwen2").qkv_bias
    assert not layer("qwen2").qk_norm
    assert layer("qwen3").qk_norm
    assert layer("qwen3").head_dim == 128
    assert layer("qwen3", head_dim=32).head_dim == 32
    assert not layer("qwen3").qkv_bias
    assert layer("mixtral").num_experts == 8
    assert layer("mixtral").experts_per_token == 2
    assert layer("mixtral", num_local_experts=4).num_experts == 4
    assert layer("mixtral").rms_norm_eps == 1e-5
    unnamed = {"rms_norm_eps": None, "rope_theta": None}
    with pytest.warns(UserWarning, match="names no rope_theta; taking 1e\\+06"):
        assert layer("mixtral", **unnamed).rms_norm_eps == 1e-5
    refused(
        lambda: layer("mixtral", num_experts_per_tok=9),
        "num_experts_per_tok = 9 is more than",
    )


def test_a_sliding_window_that_is_no_size_is_refused(tmp_path: Path) -> None:
    refused(
        lambda: target_config(write(tmp_path, MISTRAL | {"sliding_window": "4096"})),
        "sliding_window",
    )


def test_a_mistral_without_a_sliding_window_has_the_usual_one(tmp_path: Path) -> None:
    unnamed = {name: MISTRAL[name] for name in MISTRAL if name != "sliding_window"}
    assert target_config(write(tmp_path, unnamed)).sliding_window == 4096
