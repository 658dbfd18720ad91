"""The paths of the server, and who may ask."""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_jax.engine import Piece, Text
from eagle_jax.errors import InputError, one_line
from eagle_jax.serve.answers import Answer, ChatAnswer
from eagle_jax.serve.driver import Call, Driver
from eagle_jax.serve.errors import UNAVAILABLE, ServeError, error_response, no_model
from eagle_jax.serve.requests import Reader

_BODY_SECONDS = 30
_CLOSE_SECONDS = 30

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The settings of a server.

    Attributes:
        model: The name that the pair is served under.
        api_key: What clients must know; `None` where they are on this machine.
        max_body: The most bytes of a request.
        log: What is told each request in a line, once its answer has ended.
    """

    model: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    max_body: int = 4 * 2**20
    log: Callable[[str], None] = lambda line: None


def make_app(driver: Driver, config: ServeConfig) -> Starlette:
    """Returns the server's application, which starts the driver and ends it."""
    reader = Reader(driver, config.model)
    started = int(time.time())
    lock = asyncio.Lock()

    def texts(path: str, *, is_chat: bool) -> Route:
        answers = _Texts(driver, reader, config.max_body, is_chat, lock)
        return Route(path, answers, methods=["POST"])

    async def health(request: Request) -> JSONResponse:
        if driver.is_alive:
            return JSONResponse({"status": "ok"})
        told = "unavailable" if driver.is_ready else "compiling"
        return JSONResponse({"status": told}, 503, UNAVAILABLE)

    async def metrics(request: Request) -> PlainTextResponse:
        counts = {"waiting": driver.num_waiting, "running": driver.num_running}
        return PlainTextResponse(driver.metrics.render(**counts))

    async def models(request: Request) -> JSONResponse:
        card = {"id": config.model, "object": "model", "created": started}
        card |= {"owned_by": "eagle_jax", "max_model_len": driver.max_length}
        named = request.path_params.get("name", config.model)
        if named != config.model:
            raise no_model(named, config.model)
        is_one = "name" in request.path_params
        return JSONResponse(card if is_one else {"object": "list", "data": [card]})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        driver.start()
        yield
        driver.close()
        # Nothing ends what is being compiled.
        await asyncio.to_thread(driver.join, _CLOSE_SECONDS * driver.is_ready)

    return Starlette(
        routes=[
            texts("/v1/completions", is_chat=False),
            texts("/v1/chat/completions", is_chat=True),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[
            Middleware(_logged, tell=config.log),
            Middleware(_Guard, api_key=config.api_key),
        ],
        exception_handlers=dict.fromkeys(
            (InputError, HTTPException, Exception), _answer_error
        ),
        lifespan=lifespan,
    )


@dataclasses.dataclass(frozen=True)
class _Texts:
    """A path that answers with texts."""

    driver: Driver
    reader: Reader
    max_body: int
    is_chat: bool
    lock: asyncio.Lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; whatever ends it, its texts end with it."""
        request = Request(scope, receive)
        with Call(self.driver) as call:
            scope["tokens"] = call.tokens
            body = await _read_body(request, self.max_body)
            read = self.reader.read
            asked = await asyncio.to_thread(read, body, is_chat=self.is_chat)
            call.tokens[0] = asked.num_prompt_tokens
            await self._compile(asked.texts)
            call.ask(asked.texts)
            kind = ChatAnswer if self.is_chat else Answer
            answer, pieces = kind(asked, self.reader.model), call.pieces()
            if not asked.is_streamed:
                whole = await _unless_gone(receive, _all(pieces))
                if whole is not None:
                    await JSONResponse(answer.whole(whole))(scope, receive, send)
                return
            # What is refused late has its own status, as long as nothing was sent.
            first = await _unless_gone(receive, anext(pieces))
            if first is not None:
                events = answer.events(_joined(first, pieces))
                headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
                response = StreamingResponse(
                    events, headers=headers, media_type="text/event-stream"
                )
                await response(scope, receive, send)

    async def _compile(self, texts: Sequence[Text]) -> None:
        """Compiles a constraint, one at a time; the engine's thread never does."""
        if texts[0].needs.grammar is None:
            return
        async with self.lock:
            compiled = texts[0].needs.compiled
            needs = await asyncio.to_thread(compiled, self.driver.pair)
        for text in texts:
            text.needs = text.needs.with_grammar(needs.grammar)


def _logged(app: ASGIApp, tell: Callable[[str], None]) -> ASGIApp:
    """Returns the application, which tells each request in a line."""

    async def passed_on(scope: Scope, receive: Receive, send: Send) -> None:
        # So nginx says of a client that hung up before it was answered.
        started, status = time.monotonic(), 499

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            read, made, took = *scope.get("tokens", (0, 0)), time.monotonic() - started
            told = f"{status}, {read} + {made} tokens, {took:.2f} s"
            if scope["type"] == "http":
                tell(one_line(f"{scope['method']} {scope['path']} {told}"))

    return passed_on


class _Guard:
    """Lets in who knows the key or, without one, who asks from this machine.

    A page in a browser may send requests to this machine, too: it cannot send JSON
    without asking first, and where it calls itself this machine by a name of its own,
    that name is the request's host.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._wanted = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it before its body is read."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        app = self._app if error is None else error_response(error)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ServeError | None:
        headers = dict(scope["headers"])
        if scope["path"] == "/health":
            return None
        if self._wanted is not None:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                return ServeError("give the server's key, as `Bearer KEY`", 401)
        elif not is_local(_host_name(headers.get(b"host", b""))):
            told = "without --api-key the server answers on this machine alone"
            return ServeError(told, 403)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            return ServeError("give content-type: application/json", 415)
        return None


def is_local(host: str) -> bool:
    """Returns whether a host's name or address always means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_name(header: bytes) -> str:
    """Returns the name in a `Host` header, without its port.

    >>> _host_name(b"localhost:8000"), _host_name(b"[::1]:8000")
    ('localhost', '::1')
    """
    text = header.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


async def _read_body(request: Request, most: int) -> bytes:
    """Returns the body of a request, which comes in time and is not too long."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise ServeError(f"the body has more than {most} bytes", 413)
    except ClientDisconnect:
        raise ServeError("the client has hung up") from None
    except TimeoutError:
        raise ServeError(f"the body took more than {_BODY_SECONDS} s", 408) from None
    return bytes(body)


async def _unless_gone(receive: Receive, waited: Awaitable[Found]) -> Found | None:
    """Returns what is waited for, `None` as soon as the client has hung up."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone, found = asyncio.create_task(hang_up()), asyncio.ensure_future(waited)
    try:
        await asyncio.wait({gone, found}, return_when=asyncio.FIRST_COMPLETED)
        return found.result() if found.done() else None
    finally:
        for task in (gone, found):
            task.cancel()
        await asyncio.wait({gone, found})


async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return sorted([piece async for piece in pieces], key=lambda piece: piece.index)


async def _joined(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        told = f"{request.method} {request.url.path}: {error.detail}"
        error = ServeError(told, error.status_code)
    return error_response(error)
