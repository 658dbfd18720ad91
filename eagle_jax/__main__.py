"""Runs a command: `python -m eagle_jax COMMAND` is `eagle-jax COMMAND`."""

from eagle_jax_command import main

if __name__ == "__main__":
    main()
