"""What cannot be in memory is refused before it is made, and nothing else is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from eagle_jax.checkpoints.load import target_shapes
from eagle_jax.config import TreeConfig
from eagle_jax.generation import memory
from eagle_jax.generation.pairs import PairSource
from eagle_jax.generation.random_pairs import open_random
from eagle_jax.models.quantized import num_bytes
from eagle_jax.models.transformer import Transformer
from tests.helpers import refused, settings_of

_GIB = 2**30
_SIZES = "hidden=64,layers=3,heads=4,kv_heads=2,vocabulary=300"
_HUGE = 2**31 - 1
TREE = TreeConfig(num_nodes=8, depth=3, width=2)


def opened(sizes: str = _SIZES, **decoding: Any) -> PairSource:
    return open_random(sizes, settings_of(TREE, **decoding))


@pytest.fixture
def of_16_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with that much memory."""
    monkeypatch.setattr(memory, "_memory", lambda: 16 * _GIB)


@pytest.mark.usefixtures("of_16_gib")
def test_batches_that_cannot_be_in_memory_are_refused() -> None:
    source = opened()
    source.check_memory(batch_size=1, max_length=_HUGE)  # A cache begins small.
    refused(
        lambda: source.check_memory(batch_size=10**9, max_length=128),
        "batch_size = 1000000000, ",
        "GiB, but there are 16.0 GiB of memory; lower one of them",
    )


@pytest.mark.usefixtures("of_16_gib")
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        "hidden=1024000,layers=1,heads=4,vocabulary=300",
        "hidden=64,layers=999999999,heads=4,vocabulary=300",
        "hidden=64,layers=1,heads=4,vocabulary=999999999",
    ],
)
def test_weights_that_cannot_be_in_memory_are_refused(
    sizes: str, bits: int | None
) -> None:
    hidden, layers, _, vocabulary = sizes.replace("=", " = ").split(",")
    given = f"int{bits}" if bits else "none"
    refused(lambda: opened(sizes, quantization=given), hidden, layers, vocabulary)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_no_more_is_asked_for_than_a_run_has_at_once(
    bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, slots = 2, 128
    source = opened(quantization=f"int{bits}" if bits else "none")
    target, drafter = Transformer(config=source.config), source.drafter
    assert drafter is not None
    there = num_bytes(
        (
            target_shapes(source.config, bits),
            jax.eval_shape(lambda: target.init_cache(rows, slots)),
            jax.eval_shape(lambda: drafter.init_state(rows, slots)),
        )
    )

    def check() -> None:
        memory.check_memory(
            source.config, "float32", bits, drafter, batch_size=rows, num_slots=slots
        )

    monkeypatch.setattr(memory, "_memory", lambda: there)
    check()
    monkeypatch.setattr(memory, "_memory", lambda: int(0.95 * there))
    refused(check, "GiB")


def test_the_memory_is_what_devices_or_else_the_host_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MEMINFO", path)
    assert memory._memory() is None
    path.write_text("MemTotal:  4 kB\nMemFree:  1 kB\nPages:  0\nSwapTotal:  2 kB\n")
    assert memory._memory() == 6 * 1024
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 3 * _GIB})
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert memory._memory() == 6 * _GIB
