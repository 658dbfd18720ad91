"""Runs `eagle-jax calibrate`: eagle_jax/cli/calibrate.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("calibrate")
