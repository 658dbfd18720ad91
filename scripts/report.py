"""Runs `eagle-jax report`: eagle_jax/cli/report.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("report")
