"""Processes with several CPU devices: how many is fixed when a process starts."""

import os
import subprocess
import sys
from pathlib import Path

import jax

REPOSITORY = Path(__file__).resolve().parents[1]

# Code per fusion runs fast and takes three times as long to compile; what is fused,
# and how a program is split over devices, is decided before. Another jaxlib might not
# know the flags, and would end every process.
QUICK = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if jax.__version_info__[:2] == (0, 10)
    else ""
)


def with_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many devices that compiles quickly."""
    flags = [os.environ.get("XLA_FLAGS", ""), QUICK]
    flags += [f"--xla_force_host_platform_device_count={count}"]
    cache = str(jax.config.values["jax_compilation_cache_dir"])
    return os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS": "0",
    }


def run_module(name: str, *arguments: object, num_devices: int) -> list[str]:
    """Runs a module of `tests.parallel` in such a process; returns what it says.

    Its last line is "done".
    """
    process = subprocess.run(
        [sys.executable, "-m", f"tests.parallel.{name}", *map(str, arguments)],
        cwd=REPOSITORY,
        env=with_devices(num_devices),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    *lines, last = process.stdout.splitlines()
    assert last == "done"
    return lines
