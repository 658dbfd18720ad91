"""Runs `eagle-jax train`: eagle_jax/cli/train.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("train")
