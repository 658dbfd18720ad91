"""Runs `eagle-jax pretrain`: eagle_jax/cli/pretrain.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("pretrain")
