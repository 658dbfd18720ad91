"""The kernel of GPUs, run on a CPU, mixes what plain attention does."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from eagle_jax.models.attention import attend
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.fused_attention import mix_at_once


@pytest.mark.parametrize(
    ("sizes", "lengths", "windowed", "cap"),
    [
        pytest.param((2, 4, 60, 320, 60, 32), [300], False, None, id="tree"),
        pytest.param((2, 3, 10, 320, 50, 16), [0, 320], False, 5.0, id="levels, rows"),
        pytest.param((1, 1, 1, 272, 1, 16), [33], False, None, id="token"),
        pytest.param((2, 3, 8, 1088, 8, 16), [999, 70], True, None, id="window"),
        pytest.param((2, 1, 90, 576, 120, 16), [5], False, None, id="blocks of nodes"),
    ],
)
def test_it_mixes_what_plain_attention_mixes(
    sizes: tuple[int, ...], lengths: list[int], windowed: bool, cap: float | None
) -> None:
    groups, repeats, num_tokens, num_slots, num_new, head_dim = sizes
    batch = len(lengths)
    keys = jax.random.split(jax.random.key(sum(sizes)), 6)

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, (batch, *shape))

    query = draw(keys[0], num_tokens, groups * repeats, head_dim)
    cached, new = (
        KeyValues(
            keys=draw(keys[number], groups, size, head_dim),
            values=draw(keys[number + 1], groups, size, head_dim),
        )
        for number, size in ((1, num_slots), (3, num_new))
    )
    own = jnp.arange(num_tokens)
    mask = jax.random.bernoulli(keys[5], 0.4, (batch, num_tokens, num_new))
    mask = mask.at[:, own, num_new - num_tokens + own].set(True)
    length = jnp.array(lengths)
    first = length[:, None] // 2 + own if windowed else None

    rows = query.reshape(batch, num_tokens, groups, repeats, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4) * head_dim**-0.5
    mix = functools.partial(mix_at_once, cap=cap, is_interpreted=True)
    _, total, mixed = mix(rows, cached, length, new, mask, first)
    found = (mixed / total).transpose(0, 3, 1, 2, 4).reshape(batch, num_tokens, -1)

    expected = attend(query, cached, length, new, mask, first, cap=cap)
    assert jnp.allclose(found, expected, rtol=0, atol=1e-5)


H100 = AbstractDevice(
    device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"
)


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "head_dim", "dtype", "device", "is_fused"),
    [
        pytest.param(60, 1088, 128, "bfloat16", H100, True, id="tree"),
        pytest.param(1, 272, 64, "float16", H100, True, id="token"),
        pytest.param(60, 1088, 128, "float32", H100, False, id="wide type"),
        pytest.param(60, 1088, 80, "bfloat16", H100, False, id="width of heads"),
        pytest.param(60, 1090, 128, "bfloat16", H100, False, id="slots"),
        pytest.param(256, 1088, 128, "bfloat16", H100, False, id="prompt"),
        pytest.param(60, 1088, 128, "bfloat16", None, False, id="unknown GPU"),
    ],
)
def test_gpus_run_it_where_it_fits(
    num_tokens: int,
    num_slots: int,
    head_dim: int,
    dtype: str,
    device: AbstractDevice | None,
    is_fused: bool,
) -> None:
    assert is_run(num_tokens, num_slots, head_dim, dtype, device) == is_fused


@pytest.mark.parametrize(
    ("version", "is_fused"), [("7.5", False), ("8.0", True), ("gfx90a", False)]
)
def test_older_gpus_and_others_mix_as_before(
    version: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=version)
    monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu])
    assert is_run(60, 1088, 128, "bfloat16", H100) == is_fused


def is_run(
    num_tokens: int, num_slots: int, head_dim: int, dtype: str, device: Any
) -> bool:
    """Whether a program for a GPU runs the kernel."""

    def shape(*sizes: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct((1, *sizes), jnp.dtype(dtype))

    cached, new = (
        KeyValues(keys=shape(2, size, head_dim), values=shape(2, size, head_dim))
        for size in (num_slots, num_tokens)
    )
    mask = shape(num_tokens, num_tokens, dtype="bool")
    arrays = shape(num_tokens, 4, head_dim), cached, shape(dtype="int32"), new, mask
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        # A function of its own, or an earlier trace would serve.
        program = jax.jit(functools.partial(attend))
        lowered = program.trace(*arrays).lower(lowering_platforms=("cuda",))
    return "xla.gpu.triton" in lowered.as_text()
