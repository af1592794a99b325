"""A real OpenAI-compatible endpoint on the loopback address, for tests of judges."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Endpoint(ThreadingHTTPServer):
    """OpenAI's chat endpoint, as far as a judge needs it. It prefers the longer answer, and says
    what it was told to once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.failures: list[int] = []
        self.always = ""
        self.refused: dict[str, str] = {}
        """Fields that it takes in no body, each with what it says then."""
        self.cut = 0
        """Replies that end before they are whole."""

    def verdict(self, system: str, text: str) -> str:
        if self.always:
            return self.always
        if "referee" in system:
            a, _, b = text.partition("=== Conversation with assistant B ===")
            longer = len(a) - len("=== Conversation with assistant A ===\n\n") - len(b)
            return "Because. " + (
                "[[C]]" if abs(longer) < 8 else "[[A]]" if longer > 0 else "[[B]]"
            )
        return f"Fine. Rating: [[{min(10, len(text.rsplit(chr(10), 1)[1]))}]]"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self.server.keys.add(self.headers["Authorization"])
        code = self.server.failures.pop() if self.server.failures else 200
        said = self.server.verdict(*(each["content"] for each in body["messages"]))
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]})
        if refusals := [told for name, told in self.server.refused.items() if name in body]:
            code, reply = 400, json.dumps({"error": {"message": refusals[0]}})
        self.send_response(code if self.path == "/v1/chat/completions" else 404)
        if self.server.cut:
            self.server.cut -= 1
            self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *_: Any) -> None:
        """Nobody wants to know."""


@contextmanager
def serving() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
