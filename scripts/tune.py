"""Runs `eagle-jax tune`: eagle_jax/cli/tune.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("tune")
