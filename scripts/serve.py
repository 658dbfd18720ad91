"""Runs `eagle-jax serve`: eagle_jax/cli/serve.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("serve")
