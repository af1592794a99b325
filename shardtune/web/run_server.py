"""The server process: listens, says so, and drains on Ctrl-C."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from shardtune.errors import LaunchError, Problem

DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_server(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    drain_seconds: int,
    ready: Callable[[str], None],
    draining: Callable[[], None],
) -> None:
    """Serves until a signal comes. Answers that are on their way then are finished, for at most
    `drain_seconds`; a second Ctrl-C ends them at once. `ready` hears the address, `draining` is
    called when the signal comes."""
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=drain_seconds,
        ws="none",
        server_header=False,
    )
    shown = f"[{host}]" if ":" in host else host
    server = _Server(config, draining)
    with server.capture_signals():  # uvicorn starts to listen to them a moment later
        ready(f"http://{shown}:{listening.getsockname()[1]}")
        server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        fact = f"can't listen: {error.strerror or error}"
        fix = "choose another --port (0 takes a free one)"
        raise LaunchError(Problem(f"{host}:{port}", fact, fix)) from None
    listening.listen(128)
    return listening


class _Server(uvicorn.Server):
    """uvicorn, which would raise the signal again when it has drained: that is no failure here."""

    def __init__(self, config: uvicorn.Config, draining: Callable[[], None]) -> None:
        super().__init__(config)
        self._draining = draining

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in DRAIN_SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._draining()
        super().handle_exit(sig, frame)
