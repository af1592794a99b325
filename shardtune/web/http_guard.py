"""Who may ask: the Host header, the Origin, the API key; and how much they may send.

A server on the loopback interface without a key can be reached by every page that the user's
browser shows: by DNS rebinding, which the Host header gives away, or by a form, which the Origin
and the content type do.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from shardtune.web.replies import ApiError, error_reply


@dataclass(frozen=True)
class AccessRules:
    """Who may ask."""

    key: str | None = None
    loopback_only: bool = True


class Guard:
    """Refuses a request before anything reads its body. `open_paths` need no key: they tell
    nothing of what is served."""

    def __init__(
        self, app: ASGIApp, *, access: AccessRules, open_paths: Collection[str] = ()
    ) -> None:
        self._app, self._access, self._open_paths = app, access, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except ApiError as error:
                await error_reply(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if self._access.loopback_only and not is_loopback(_hostname(host)):
            fact = f"the Host header says {host[:100]!r}, but this server answers on loopback alone"
            raise ApiError(403, fact, "host_not_allowed")
        origin = request.headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            raise ApiError(403, "a page of another site may not ask here", "origin_not_allowed")
        # The path that is routed by. Some versions of Starlette build `url` with the Host header.
        is_open = request.scope["path"] in self._open_paths
        # A picture or a link of another page has no Origin, but a browser says where it is from.
        if not is_open and request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise ApiError(403, "a page of another site may not ask here", "origin_not_allowed")
        if self._access.key is not None and not is_open:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(), self._access.key.encode())
            if scheme.lower() != "bearer" or not same:
                raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")
        if request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                fact = f"the body is {kind or 'of no type'}; it has to be application/json"
                raise ApiError(415, fact, "unsupported_media_type")


async def limited_body(request: Request, most: int) -> bytes:
    """The body, of which no more than `most` bytes are read."""
    too_much = ApiError(413, f"the body has more than {most:,} bytes", "request_too_large")
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most:
        raise too_much
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_much
    except ClientDisconnect:
        raise ApiError(400, "the client went away before it had sent the body") from None
    return bytes(body)


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _netloc(origin: str) -> str | None:
    """The host and port of an Origin; None where it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
