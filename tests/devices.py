"""How tests run XLA on CPUs; flags are read when a process starts its devices."""

import os

import jax

# Code per fusion is quick to run and takes three times as long to compile. What is
# fused, aliased, copied or sent between devices is decided before.
QUICK_FLAGS = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def add_quick_flags() -> None:
    """Makes this process, and those that it starts, compile in a third of the time.

    Another jaxlib might not know the flags, and a process would not survive them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__[:2] == (0, 10) and QUICK_FLAGS[0] not in flags:
        os.environ["XLA_FLAGS"] = " ".join((flags, *QUICK_FLAGS))


def with_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={count}"
    cache = str(jax.config.values["jax_compilation_cache_dir"])
    return os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
