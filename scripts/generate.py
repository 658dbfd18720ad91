"""Runs `eagle-jax generate`: eagle_jax/cli/generate.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("generate")
