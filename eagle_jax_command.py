"""Where every command starts: `eagle-jax COMMAND` and `scripts/COMMAND.py`.

This module lies beside the package because importing the package takes a while, and
Ctrl-C ends a command in one line from its first moment.
"""

import os
import signal
from typing import NoReturn


def main(command: str | None = None) -> NoReturn:
    """Runs a command and ends the process with its exit code.

    Args:
        command: A module of `eagle_jax.cli`; `None` for the one that the first argument
            names.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Until `run_script` takes over nothing is to be undone.
        signal.signal(
            signal.SIGINT, lambda *_: os._exit(os.write(2, b"interrupted\n") and 130)
        )
    from eagle_jax.cli.main import run

    run(command)
