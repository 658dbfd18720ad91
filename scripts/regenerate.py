"""Runs `eagle-jax regenerate`: eagle_jax/cli/regenerate.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("regenerate")
