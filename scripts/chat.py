"""Runs `eagle-jax chat`: eagle_jax/cli/chat.py."""

from eagle_jax_command import main

if __name__ == "__main__":
    main("chat")
