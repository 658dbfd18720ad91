"""A server of the tiny pair, inside the test's own process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from eagle_jax import Pair, TreeConfig, load_pair
from eagle_jax.serve.app import ServeConfig, make_app
from eagle_jax.serve.driver import Driver
from tests.helpers import settings_of

TREE = TreeConfig(num_nodes=6, depth=2, width=3)


@pytest.fixture(scope="session")
def pair(chat_pair: Path) -> Pair:
    return load_pair(f"{chat_pair}/target", f"{chat_pair}/head", settings_of(TREE))


@pytest.fixture(scope="module")
def driver(pair: Pair) -> Driver:
    return Driver(pair, batch_size=4, max_waiting=60, max_length=128)


@pytest.fixture(scope="module")
def client(driver: Driver) -> Iterator[TestClient]:
    app = make_app(driver, ServeConfig(model="tiny", max_body=20_000))
    with TestClient(app, base_url="http://localhost") as client:
        yield client
