"""An application of the package behind a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def behind_socket(app: Any, draining: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Serves `app` from a thread, on a port that was free; gives its address. At the end, after
    `draining`, no connection may keep the server."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        draining()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "a stream has kept the server from ending"
