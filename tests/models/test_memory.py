"""What cannot be in memory is refused before it is made, and nothing else is."""

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from eagle_jax.checkpoints.load import target_shapes
from eagle_jax.config import TreeConfig
from eagle_jax.drafting import TreeDrafter
from eagle_jax.engine.calls import check_memory
from eagle_jax.engine.open import open_pair
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.models import devices
from eagle_jax.models.quantized import num_bytes
from eagle_jax.models.transformer import Transformer
from tests import tiny
from tests.helpers import refused, settings_of

_GIB = 2**30
# The groups of int4 weights divide these.
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture
def of_16_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with that much memory."""
    monkeypatch.setattr(devices, "_memory", lambda: 16 * _GIB)


@pytest.mark.usefixtures("of_16_gib")
def test_batches_that_cannot_be_in_memory_are_refused(tiny_pair: Path) -> None:
    names = (str(tiny_pair / "target"), str(tiny_pair / "head"))
    pair = open_pair(*names, settings_of())
    check_memory(pair, batch_size=1, max_length=2**31 - 1)  # A cache begins small.
    refused(
        lambda: check_memory(pair, batch_size=10**9, max_length=128),
        "batch_size = 1000000000, ",
        "GiB, but there are 16.0 GiB of memory; lower one of them",
    )


@pytest.mark.usefixtures("of_16_gib")
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 1024000, "intermediate_size": 1024000},
        {"num_layers": 999999999},
        {"vocab_size": 999999999},
    ],
)
def test_weights_that_cannot_be_in_memory_are_refused(
    sizes: dict[str, int], bits: int | None
) -> None:
    config = tiny.target_config(**_SIZES | sizes)
    refused(
        lambda: devices.check_memory(config, "float32", bits),
        f"hidden = {config.layer.hidden_size}, layers = {config.num_layers}, ",
        f"vocabulary = {config.vocab_size} in float32",
    )


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_no_more_is_asked_for_than_a_run_has_at_once(
    bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, slots = 2, 128
    target = Transformer(config=tiny.target_config(num_layers=3, **_SIZES))
    head = EagleHead(config=tiny.head_config(**_SIZES))
    drafter = TreeDrafter(model=head, tree=TreeConfig())
    there = num_bytes(
        (
            target_shapes(target.config, bits),
            jax.eval_shape(lambda: target.init_cache(rows, slots)),
            jax.eval_shape(lambda: drafter.init_state(rows, slots)),
        )
    )

    def check() -> None:
        devices.check_memory(
            target.config, "float32", bits, drafter, batch_size=rows, num_slots=slots
        )

    monkeypatch.setattr(devices, "_memory", lambda: there)
    check()
    monkeypatch.setattr(devices, "_memory", lambda: int(0.95 * there))
    refused(check, "GiB")


def test_known_sizes_are_traced_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = TreeDrafter(model=EagleHead(config=tiny.head_config()), tree=TreeConfig())

    def check(batch_size: int) -> None:
        devices.check_memory(
            tiny.target_config(), "float32", None, drafter, batch_size=batch_size
        )

    check(1)
    monkeypatch.setattr(devices, "num_bytes", None)
    check(2)


def test_the_memory_is_what_devices_or_else_the_host_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "meminfo"
    monkeypatch.setattr(devices, "_MEMINFO", path)
    assert devices._memory() is None
    path.write_text("MemTotal:  4 kB\nMemFree:  1 kB\nPages:  0\nSwapTotal:  2 kB\n")
    assert devices._memory() == 6 * 1024
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 3 * _GIB})
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert devices._memory() == 6 * _GIB
