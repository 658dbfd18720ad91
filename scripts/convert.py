"""Runs `eagle-jax convert`: eagle_jax/cli/convert.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("convert")
