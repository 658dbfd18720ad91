"""Decoding over eight devices gives the tokens of one.

Devices are fixed when a process starts, so all of it runs in another one.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax

_REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_mesh_gives_the_tokens_of_one_device(
    tiny_pair: Path, tmp_path: Path
) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    cache = str(jax.config.values["jax_compilation_cache_dir"])
    process = subprocess.run(
        [
            *(sys.executable, "-m", "tests.parallel.on_eight_devices"),
            *(str(tiny_pair), str(tmp_path)),
        ],
        cwd=_REPOSITORY,
        env=os.environ
        | {
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[-1] == "done"
    assert [line for line in lines if line.startswith("equal")] == [
        *("equal 8 1 1", "equal 8 1 8", "equal 8 2 4", "equal 8 8 1"),
        "equal 2 1 8",
    ]
