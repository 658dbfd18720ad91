"""Runs `eagle-jax compile-report`: eagle_jax/cli/compile_report.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("compile_report")
