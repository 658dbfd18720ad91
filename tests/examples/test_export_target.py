"""Exported targets: read back bit for bit, and run by transformers."""

from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import Export, load_target, stop_tokens
from eagle_jax.models import transformer
from eagle_jax.models.rope import RopeConfig
from examples.embedded_pair.export_target import export_target
from tests.helpers import file_bytes, refused
from tests.tiny import LLAMA3_ROPE, ROPES, TARGET, random_target, target_config


def _transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


_WINDOW = {"sliding_window": 4, "windowed_layers": (0, 1)}
_QWEN3_MOE = {
    "qk_norm": True,
    "num_experts": 3,
    "experts_per_token": 2,
    "expert_size": 20,
    "shares_of_all": True,
}


@pytest.mark.torch
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope": LLAMA3_ROPE, "tie_embeddings": True},
        {"rope": ROPES[2], "head_dim": 16},
        _WINDOW,
        {"num_experts": 3, "experts_per_token": 2},
        _QWEN3_MOE,
        _WINDOW | {"qkv_bias": True, "windowed_layers": (1,)},
        {"qk_norm": True},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_transformers_computes_the_same_from_an_exported_target(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = target_config(num_layers=2, **changes)
    params = random_target(config)
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
    how = Export(dtype="bfloat16")
    export_target(tmp_path / "one", TARGET, random_target(dtype="bfloat16"), how)
    config, params = load_target(tmp_path / "one", None)
    chex.assert_trees_all_equal(params, random_target(dtype="bfloat16"))
    export_target(tmp_path / "two", config, params, how)
    assert file_bytes(tmp_path / "one") == file_bytes(tmp_path / "two")


def test_targets_name_what_ends_a_text(tmp_path: Path) -> None:
    export_target(tmp_path / "one", TARGET, random_target(), stop_tokens=(5, 9))
    assert stop_tokens(tmp_path / "one") == (5, 9)


def test_the_caller_adds_a_tokenizer_before_a_target_appears(tmp_path: Path) -> None:
    folder = tmp_path / "target"

    def add(unfinished: Path) -> None:
        assert not folder.exists()
        (unfinished / "tokenizer.json").write_text("{}")

    export_target(folder, TARGET, random_target(), Export(also=add))
    assert (folder / "tokenizer.json").read_text() == "{}"
    export_target(folder, TARGET, random_target(), Export(overwrite=True))
    assert sorted(file_bytes(folder)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("rope", ROPES, ids=["default", "base", "linear", "llama3"])
def test_every_rotary_embedding_is_read_back_as_it_was(
    tmp_path: Path, rope: RopeConfig
) -> None:
    target = target_config(rope=rope, rms_norm_eps=1e-6)
    export_target(tmp_path / "target", target, random_target(target))
    assert load_target(tmp_path / "target")[0] == target


def test_what_no_family_has_is_refused(tmp_path: Path) -> None:
    both = target_config(qkv_bias=True, qk_norm=True)
    refused(
        lambda: export_target(tmp_path / "target", both, random_target(both)),
        "cannot be exported",
    )
    assert not list(tmp_path.iterdir())
