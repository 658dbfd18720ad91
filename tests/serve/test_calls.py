"""Requests under way: how many there may be, and what ends them."""

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

from eagle_jax import Pair
from eagle_jax.constraints import grammar
from eagle_jax.serve.app import ServeConfig, make_app
from eagle_jax.serve.driver import Driver
from eagle_jax.serve.server import Server

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}


class Ask:
    """A request whose client reads what comes, and may hang up."""

    def __init__(self, app: Starlette, **body: Any) -> None:
        self.messages: list[Any] = []
        self.has_begun, self._gone = asyncio.Event(), asyncio.Event()
        self._left = [json.dumps(body).encode()]
        names = {b"host": b"localhost", b"content-type": b"application/json"}
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        scope |= {"headers": [*names.items()], "query_string": b"", "root_path": ""}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._left:
            return {"type": "http.request", "body": self._left.pop()}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body"):
            self.has_begun.set()

    async def hang_up(self) -> None:
        self._gone.set()
        await self.task

    async def answer(self) -> tuple[int, str]:
        await self.task
        start, *bodies = self.messages
        return start["status"], b"".join(one["body"] for one in bodies).decode()


class Served:
    """A driver with its application, whose steps may be held back or break."""

    def __init__(self, pair: Pair, batch_size: int, max_waiting: int) -> None:
        self.reports: list[str] = []
        self.driver = Driver(
            pair,
            batch_size=batch_size,
            max_waiting=max_waiting,
            max_length=128,
            report=self.reports.append,
        )
        self.app = make_app(self.driver, ServeConfig(model="tiny"))
        self.gate = threading.Event()
        self.gate.set()
        self.closes_after = 0
        self.errors: list[Exception] = []
        engine: Any = self.driver._engine
        step = engine.step

        def gated() -> Any:
            assert self.gate.wait(30)
            if self.errors:
                engine.is_broken = True
                raise self.errors.pop()
            found = step()
            self.closes_after -= 1
            if self.closes_after == 0:
                self.gate.clear()
            return found

        engine.step = gated

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Starlette]:
        async with self.app.router.lifespan_context(self.app):
            yield self.app

    async def until(self, num_running: int, num_waiting: int = 0) -> None:
        async with asyncio.timeout(30):
            while (self.driver.num_running, self.driver.num_waiting) != (
                num_running,
                num_waiting,
            ):
                await asyncio.sleep(0.01)

    def count(self, outcome: str) -> int:
        lines = self.driver.metrics.render(waiting=0, running=0).splitlines()
        name = f'eagle_jax_requests_total{{outcome="{outcome}"}} '
        return next(int(x.removeprefix(name)) for x in lines if x.startswith(name))


def test_one_request_too_many_is_told_to_ask_again(pair: Pair) -> None:
    served = Served(pair, batch_size=1, max_waiting=2)

    async def scenario() -> None:
        async with served.running() as app:
            served.gate.clear()
            first = [Ask(app, **LONG), Ask(app, **LONG, n=2, seed=0)]
            async with asyncio.timeout(30):
                while served.driver.num_claimed < 3:
                    await asyncio.sleep(0.01)
            late = Ask(app, **LONG)
            status, told = await late.answer()
            assert status == 429
            assert (b"retry-after", b"1") in late.messages[0]["headers"]
            error = json.loads(told)["error"]
            assert "3 texts are under way" in error["message"]
            served.gate.set()
            assert [(await one.answer())[0] for one in first] == [200, 200]
            assert (await Ask(app, **LONG).answer())[0] == 200

    asyncio.run(scenario())
    assert served.count("refused") == 1 and served.count("done") == 3


def test_a_server_that_compiles_says_so_and_then_serves(pair: Pair) -> None:
    compiling, told = threading.Event(), list[str]()

    def ready() -> None:
        told.append("ready")

    driver = Driver(pair, batch_size=1, max_waiting=2, max_length=128, when_ready=ready)
    warm_up = driver._warm_up

    def held_back() -> None:
        assert compiling.wait(30)
        warm_up()

    driver._warm_up = held_back
    app = make_app(driver, ServeConfig(model="tiny"))
    with TestClient(app, base_url="http://localhost") as client:
        health, post = client.get("/health"), client.post("/v1/completions", json=LONG)
        assert health.json() == {"status": "compiling"}
        assert "compiles its programs" in post.json()["error"]["message"]
        for found in (health, post):
            assert (found.status_code, found.headers["retry-after"]) == (503, "5")
        assert "eagle_jax_running 0" in client.get("/metrics").text and not told
        compiling.set()
        deadline = time.monotonic() + 100
        while client.get("/health").status_code != 200:
            assert time.monotonic() < deadline
        assert client.post("/v1/completions", json=LONG).status_code == 200
    assert told == ["ready"]


def test_a_server_that_is_stopped_while_it_compiles_does_not_wait(pair: Pair) -> None:
    compiling = threading.Event()
    driver = Driver(
        pair, batch_size=1, max_waiting=2, max_length=128, when_ready=lambda: None
    )

    def held_back() -> None:
        compiling.wait(30)

    driver._warm_up = held_back
    with TestClient(make_app(driver, ServeConfig(model="tiny"))):
        pass
    assert not driver.join(0)
    compiling.set()
    assert driver.join(30) and driver.error is None


def test_each_request_is_told_in_a_line_whatever_became_of_it(pair: Pair) -> None:
    served, lines = Served(pair, batch_size=1, max_waiting=4), list[str]()
    served.app = make_app(served.driver, ServeConfig(model="tiny", log=lines.append))

    async def scenario() -> None:
        async with served.running() as app:
            for one in ({}, {"stream": True}, {"prompt": 3}):
                await Ask(app, **LONG | one).answer()
            served.gate.clear()
            gone = Ask(app, **LONG)
            while not served.driver.num_claimed:
                await asyncio.sleep(0.01)
            await gone.hang_up()
            served.gate.set()

    asyncio.run(scenario())
    TestClient(served.app, base_url="http://else").get("/v1/models%0A%1B")
    text = "POST /v1/completions"
    numbers = "200, 2 + 60", "200, 2 + 60", "400, 0 + 0", "499, 2 + 0"
    wanted = [f"{text} {one} tokens" for one in numbers]
    wanted.append("GET /v1/models\\n\\x1b 403, 0 + 0 tokens")
    assert [line.rsplit(", ", 1)[0] for line in lines] == wanted
    assert all(line.endswith(" s") for line in lines)


def test_constraints_are_never_compiled_by_the_thread_that_writes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait: each is handed over with its request."""
    pytest.importorskip("outlines_core")
    served = Served(pair, batch_size=1, max_waiting=20)
    compile_, threads = grammar._byte_automaton, list[str]()

    def noted(given: str) -> Any:
        threads.append(threading.current_thread().name)
        return compile_(given)

    monkeypatch.setattr(grammar, "_byte_automaton", noted)

    async def scenario() -> None:
        async with served.running() as app:
            served.gate.clear()
            regexes = [f"[ab]{{{count}}}" for count in range(1, 11)]
            asks = [Ask(app, prompt="a", guided_regex=one) for one in regexes]
            async with asyncio.timeout(100):
                while len(threads) < 10:
                    await asyncio.sleep(0.01)
            served.gate.set()
            for count, one in enumerate(asks, start=1):
                (choice,) = json.loads((await one.answer())[1])["choices"]
                assert len(choice["text"]) == count

    asyncio.run(scenario())
    assert len(threads) == 10 and "engine" not in threads


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_hangs_up_frees_its_rows(pair: Pair, is_streamed: bool) -> None:
    served = Served(pair, batch_size=1, max_waiting=4)

    async def scenario() -> None:
        async with served.running() as app:
            if is_streamed:
                served.closes_after = 1
            else:
                served.gate.clear()
            asks = [Ask(app, **LONG, stream=is_streamed)]
            if is_streamed:
                await asks[0].has_begun.wait()
            asks.append(Ask(app, **LONG, stream=is_streamed))
            while served.driver.num_claimed < 2:
                await asyncio.sleep(0.01)
            for one in asks:
                await one.hang_up()
            assert served.driver.num_claimed == 0
            served.gate.set()
            await served.until(num_running=0)
            assert (await Ask(app, **LONG).answer())[0] == 200

    asyncio.run(scenario())
    assert served.count("cancelled") == 2 and served.count("done") == 1


def test_a_broken_step_changes_no_text(pair: Pair) -> None:
    served = Served(pair, batch_size=2, max_waiting=4)

    async def scenario() -> None:
        async with served.running() as app:
            _, expected = await Ask(app, **LONG, stream=True).answer()
            served.closes_after = 1
            one = Ask(app, **LONG, stream=True)
            await one.has_begun.wait()
            served.errors.append(RuntimeError("no\nmemory"))
            served.gate.set()
            _, found = await one.answer()
            assert _text(found) == _text(expected)

    asyncio.run(scenario())
    told = "error: a step broke, its texts begin anew: RuntimeError: no"
    assert served.reports == [told]


def test_a_text_whose_steps_always_break_fails_and_the_next_one_does_not(
    pair: Pair,
) -> None:
    served = Served(pair, batch_size=1, max_waiting=4)

    async def scenario() -> None:
        async with served.running() as app:
            served.errors += [RuntimeError("secret")] * 3
            status, told = await Ask(app, **LONG).answer()
            assert status == 500 and "secret" not in told
            served.closes_after = 1
            one = Ask(app, **LONG, stream=True)
            await one.has_begun.wait()
            served.errors += [RuntimeError("secret")] * 3
            served.gate.set()
            status, told = await one.answer()
            *_, last = told.removesuffix("\n\n").split("\n\n")
            assert status == 200 and "server_error" in last and "secret" not in told
            assert (await Ask(app, **LONG).answer())[0] == 200

    asyncio.run(scenario())
    assert served.count("failed") == 2 and served.count("done") == 1


def test_a_server_that_ends_refuses_new_texts_and_tells_those_under_way(
    pair: Pair,
) -> None:
    served = Served(pair, batch_size=1, max_waiting=4)

    async def scenario() -> None:
        async with served.running() as app:
            served.closes_after = 1
            one = Ask(app, **LONG, stream=True)
            await one.has_begun.wait()
            served.driver.is_draining = True
            assert (await Ask(app, **LONG).answer())[0] == 503
            served.driver.close()
            served.gate.set()
            status, told = await one.answer()
            assert status == 200 and "the server shuts down" in told
        assert served.driver.join(0)

    asyncio.run(scenario())


def test_texts_have_a_grace_period_to_end_in_and_a_second_signal_cuts_it(
    pair: Pair,
) -> None:
    served = Served(pair, batch_size=1, max_waiting=4)
    driver = served.driver
    server = Server(uvicorn.Config(served.app), driver, grace=1_000)

    def leaves() -> bool:
        return asyncio.run(server.on_tick(1))

    driver.num_claimed = 1
    assert not leaves()
    server.handle_exit(signal.SIGTERM, None)
    assert not leaves() and driver.is_draining
    driver.num_claimed = 0
    assert leaves()
    server.should_exit, driver.num_claimed = False, 1
    server.handle_exit(signal.SIGTERM, None)
    assert leaves()


def _text(stream: str) -> str:
    *lines, _ = stream.removesuffix("\n\n").split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(one["choices"][0]["text"] for one in events)
