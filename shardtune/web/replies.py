"""JSON replies, refusals, and server-sent events (SSE)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

Json: TypeAlias = dict[str, object]
Handler = Callable[[Request], Awaitable[Response]]

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Of a stream of events: no proxy on its way may keep it back."""


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal, with the status and the code that OpenAI's clients know it by."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None

    def as_json(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def json_reply(value: Json, status: int = 200) -> Response:
    return JSONResponse(value, status)


def error_reply(error: ApiError) -> Response:
    """An error in OpenAI's form."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(error.status)
    return JSONResponse(error.as_json(), error.status, headers)


def event(value: Json) -> bytes:
    """One server-sent event."""
    return event_of(json.dumps(value, ensure_ascii=False))


def event_of(text: str) -> bytes:
    """One server-sent event, of JSON that is written already."""
    return b"data: " + text.encode() + b"\n\n"


def with_refusals(handler: Handler) -> Handler:
    """The handler, whose refusals become replies."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error_reply(error)

    return wrapped


async def no_such_path(request: Request, error: Exception) -> Response:
    """The reply to a path or a method that no route takes."""
    status = getattr(error, "status_code", 404)
    fact = f"{request.method} {request.scope['path'][:100]} is not served"
    return error_reply(ApiError(status, fact, "not_found"))
