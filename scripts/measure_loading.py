r"""Measures what loading a target's weights takes: memory and time, in each process.

    python scripts/measure_loading.py --target FOLDER
    python scripts/measure_loading.py --target FOLDER --mesh tensor=2 \
        --coordinator HOST:PORT --num-processes 2 --process-id 0   (and 1)

Needs Linux, which tells the peak of a process's memory.
"""

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Imports take a while; until `run_script` nothing is to be undone.
    signal.signal(
        signal.SIGINT, lambda *_: os._exit(os.write(2, b"interrupted\n") and 130)
    )

import argparse
import functools

import jax

from eagle_jax import checkpoints
from eagle_jax.cli.command import Parser, run_command, run_script
from eagle_jax.cli.processes import add_mesh_flags, join, mesh_shape
from eagle_jax.errors import InputError
from eagle_jax.evaluation.loading import measure_loading
from eagle_jax.generation.placing import target_shardings
from eagle_jax.parallel import place


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _measure(_parse(argv)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Measure the loading of a target.")
    add = parser.add_argument
    add("--target", required=True, help="a Hugging Face folder or hub name")
    add(
        "--dtype",
        choices=("stored", "float32", "bfloat16", "float16"),
        default="stored",
        help="that the weights are loaded in",
    )
    add_mesh_flags(parser)
    return parser.parse_args(argv)


def _measure(arguments: argparse.Namespace) -> int:
    join(arguments)
    shape = mesh_shape(arguments)
    folder = checkpoints.resolve(arguments.target)
    config = checkpoints.target_config(folder)
    files = sorted(
        path
        for pattern in ("*.safetensors", "pytorch_model*.bin", "params/**/*")
        for path in folder.glob(pattern)
        if path.is_file()
    )
    if not files:
        raise InputError(f"{folder} holds no weights")
    placement = None if shape is None else place(shape, config, batch_size=shape.data)
    bits = checkpoints.target_bits(checkpoints.open_weights(folder), config, None)
    dtype = None if arguments.dtype == "stored" else arguments.dtype
    load = functools.partial(
        checkpoints.load_target,
        folder,
        dtype,
        target_shardings(placement, config, bits),
    )
    cost = measure_loading(lambda: load()[1], files)
    print(
        f"process {jax.process_index()} of {jax.process_count()} | "
        f"{jax.local_device_count()} devices | {cost.summary()}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    run_script(main)
