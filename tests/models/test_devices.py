"""libtpu is loaded where there is a TPU, and nowhere else."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend import backend

from eagle_jax.models import devices

ASK = """
import jax
from eagle_jax.models.devices import leave_out_tpus
leave_out_tpus()
print(jax.devices()[0].platform)
print("libtpu.so" in open("/proc/self/maps").read())
"""


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Grows with what JAX is told to leave out; as on a machine without a TPU."""
    names: list[str] = []

    def note(name: str, *_: Any, **__: Any) -> None:
        names.append(name)

    monkeypatch.setattr(backend, "register_backend_factory", note)
    before = jax.config.values["jax_platforms"]
    yield names
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("files", "platforms", "expected"),
    [
        (("/no/such/*",), None, ["tpu"]),
        (("/no/such/*", "/dev/nul[k-m]"), None, []),
        # Chosen by the user, or by JAX that has found a TPU.
        (("/no/such/*",), "tpu,cpu", []),
        (("/no/such/*",), "cpu", []),
    ],
)
def test_a_tpu_is_left_out_where_there_is_none_and_no_platform_is_chosen(
    left_out: list[str],
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[str, ...],
    platforms: str | None,
    expected: list[str],
) -> None:
    monkeypatch.setattr(devices, "_TPU_FILES", files)
    jax.config.update("jax_platforms", platforms)
    devices.leave_out_tpus()
    assert left_out == expected


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is missing; pip install '.[tpu-compile]' brings it",
)
@pytest.mark.skipif(
    any(devices.glob.glob(files) for files in devices._TPU_FILES),
    reason="this machine may have a TPU",
)
def test_libtpu_is_not_loaded_and_says_nothing() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True
    )
    platform, is_loaded = done.stdout.split()
    assert platform != "tpu"
    assert is_loaded == "False"
    assert done.stderr == ""
