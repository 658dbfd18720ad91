"""Runs `eagle-jax count-tokens`: eagle_jax/cli/count_tokens.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("count_tokens")
