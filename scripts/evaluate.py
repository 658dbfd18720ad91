"""Runs `eagle-jax evaluate`: eagle_jax/cli/evaluate.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("evaluate")
