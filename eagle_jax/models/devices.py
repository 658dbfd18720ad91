"""The devices at hand: which there are, and what they can compute."""

import glob
from typing import NoReturn

import jax
from jax.extend import backend

_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""Files that drivers of TPU chips make; other devices may have such files, too."""


def leave_out_tpus() -> None:
    """Keeps JAX from loading libtpu where there is no TPU; to be called before it runs.

    Without a TPU libtpu prints warnings and reports of its own. Nothing changes where
    platforms are chosen: by the user in `JAX_PLATFORMS`, or by JAX, which looks for the
    chips when it is imported.
    """
    is_chosen = jax.config.values["jax_platforms"]
    if is_chosen or any(glob.glob(files) for files in _TPU_FILES):
        return
    # As if libtpu were not installed: other devices are found as ever.
    backend.register_backend_factory("tpu", _find_no_tpu, fail_quietly=True)


def _find_no_tpu() -> NoReturn:
    raise RuntimeError("this machine has no TPU")


def on_cpu() -> bool:
    """Returns whether the default device is a CPU, on which bfloat16 is slow."""
    return jax.devices()[0].platform == "cpu"
