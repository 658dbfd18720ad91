"""Runs `eagle-jax export`: eagle_jax/cli/export.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("export")
