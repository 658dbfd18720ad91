"""What is refused, as OpenAI's clients read it."""

from typing import Any

from starlette.responses import JSONResponse

from eagle_jax.errors import InputError

_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "unavailable"}

UNAVAILABLE = {"retry-after": "5"}  # Seconds.


class ServeError(InputError):
    """A request that gets an error instead of texts.

    Attributes:
        status: The HTTP status.
        code: OpenAI's name of the error.
    """

    def __init__(
        self,
        message: object,
        status: int = 400,
        *,
        setting: str | None = None,
        code: str | None = None,
    ) -> None:
        """Takes the message, of which one line is kept."""
        super().__init__(message, setting=setting)
        self.status = status
        self.code = code or _CODES.get(status)


def error_body(error: Exception) -> dict[str, Any]:
    """Returns OpenAI's error object; only an `InputError` tells what it is about."""
    told = error if isinstance(error, InputError) else failure()
    status = getattr(told, "status", 400)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    fields = {
        "message": str(told),
        "type": "rate_limit_error" if status == 429 else kind,
        "param": told.setting,
        "code": getattr(told, "code", None),
    }
    return {"error": fields}


def error_response(error: Exception) -> JSONResponse:
    """Returns the answer to a request that was refused or failed."""
    status = 400 if isinstance(error, InputError) else 500
    status = getattr(error, "status", status)
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}
    headers[503] = UNAVAILABLE
    return JSONResponse(error_body(error), status, headers.get(status))


def no_model(named: object, model: str) -> ServeError:
    """Returns the error of a request to another model than the server's."""
    told = f"there is no model {named!r}; this is {model}"
    return ServeError(told, 404, setting="model", code="model_not_found")


def failure() -> ServeError:
    """Returns what a client hears of an error that it cannot mend."""
    return ServeError("the server failed to answer; its own log says why", 500)
