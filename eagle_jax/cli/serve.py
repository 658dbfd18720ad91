"""Serves a pair over HTTP, in OpenAI's protocol.

    eagle-jax serve --port 8000
    eagle-jax serve --target FOLDER --draft FOLDER --host 0.0.0.0

Without a target the embedded pair writes Python. Clients on other machines need a key:
--api-key, or EAGLE_JAX_API_KEY, which no list of processes shows.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from eagle_jax.cli.command import Parser, command, say
from eagle_jax.cli.pair_flags import add_flags, choose_embedded, open_named
from eagle_jax.cli.settings import PAIR_GROUPS, add_groups, join_settings
from eagle_jax.config import DRAWS, require
from eagle_jax.engine.config import PairConfig
from eagle_jax.errors import InputError
from eagle_jax.parallel import parse_mesh

_GROUPS = {"where a request says nothing": " ".join(DRAWS)}


@command(unwritable="cannot serve: {error}")
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    config = join_settings(arguments.config, arguments)
    try:
        from eagle_jax.serve.app import ServeConfig, make_app
        from eagle_jax.serve.driver import Driver
        from eagle_jax.serve.server import listen, serve
    except ModuleNotFoundError as error:
        raise InputError(
            f"the package {error.name} is not installed, which serving needs; "
            "pip install '.[serve]' in the clone brings it"
        ) from error
    _check(arguments)
    mesh = None if arguments.mesh is None else parse_mesh(arguments.mesh)
    pair = open_named(arguments, config, mesh)
    has_key = arguments.api_key is not None
    with listen(arguments.host, arguments.port, has_key=has_key) as listening:
        name = arguments.served_model_name or Path(arguments.target).name
        settings = ServeConfig(
            model=name, api_key=arguments.api_key, max_body=arguments.max_body
        )
        if arguments.log_requests:
            settings = dataclasses.replace(settings, log=say)
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        address = f"http://{host}:{port}"
        driver = Driver(
            pair,
            batch_size=config.batch_size,
            max_waiting=arguments.max_waiting,
            max_length=config.max_length,
            report=say,
            when_ready=lambda: say(f"serving {name} at {address}/v1"),
        )
        say(f"loading {arguments.target}; {address}/health tells when it is ready")
        app = make_app(driver, settings)
        has_ended = serve(app, driver, listening, grace=arguments.grace)
    say("ended")
    if not has_ended:
        sys.stdout.flush()
        # Python's own end would crash in the thread that still runs.
        os._exit(0)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add_flags(parser, "config", "target", "draft", "generation-config")
    add("--served-model-name", metavar="NAME", help="default the target's folder")
    add("--host", default="127.0.0.1", help="any but this machine needs --api-key")
    add("--port", type=int, default=8000, help="0 for any that is free")
    add("--api-key", help="what clients must know; better in EAGLE_JAX_API_KEY")
    add("--batch-size", type=int, default=8, help="texts written together")
    add("--max-waiting", type=int, default=64, help="texts that may wait beside them")
    add("--max-body", type=int, default=4 * 2**20, help="bytes of a request")
    grace = "seconds that texts are given to end after SIGTERM or Ctrl-C"
    add("--grace", type=float, default=30.0, help=grace)
    log = "tell each request in a line: status, tokens read and made, seconds"
    add("--log-requests", action="store_true", help=log)
    add("--mesh", metavar="SIZES", help="use all devices, such as data=2,tensor=4")
    add_groups(parser, PairConfig, _GROUPS | PAIR_GROUPS)
    arguments = parser.parse_args(argv)
    if arguments.api_key is None:  # No default: the help would show it.
        arguments.api_key = os.environ.get("EAGLE_JAX_API_KEY")
    if choose_embedded(arguments):
        arguments.served_model_name = arguments.served_model_name or "embedded"
    return arguments


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what no server can run with."""
    require(0 <= arguments.port < 2**16, "--port", arguments.port, "0 to 65535")
    waiting, longest = arguments.max_waiting, arguments.max_body
    require(waiting >= 0, "--max-waiting", waiting, "0 or more")
    require(longest >= 1, "--max-body", longest, "at least 1")
    is_time = 0 <= arguments.grace < float("inf")
    require(is_time, "--grace", arguments.grace, "0 or more")
    if arguments.api_key is not None and not arguments.api_key.strip():
        raise InputError("--api-key is empty; give a key, or leave it out")
