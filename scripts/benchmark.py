"""Runs `eagle-jax benchmark`: eagle_jax/cli/benchmark.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("benchmark")
