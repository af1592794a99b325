"""Standard output that can't hurt a run: non-blocking writes, and errors of a reader that is gone.

A write to a pipe that nobody reads waits for ever, one to a pipe whose reader has left or to a full
disk raises. Neither is a reason to stop a step: the run directory has everything. So a run writes
through these streams. What can't be written now is kept for a while, and dropped when it is too
much.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import threading
import time
from typing import TextIO, cast

ROOM = 1 << 20  # bytes that are kept for a reader that is behind
LAST_PATIENCE = 5.0  # seconds in which a reader has to go on reading when the process ends


class OutputStream(io.TextIOBase):
    """A text stream that neither blocks nor raises, in the place of one that may do both."""

    def __init__(self, replaced: TextIO, room: int = ROOM) -> None:
        self._number = replaced.fileno()
        self._encoding = replaced.encoding
        self._own = _open_nonblocking(self._number)
        self._room = room
        self._waiting = bytearray()
        self._dropped = 0
        self._lock = threading.Lock()  # a live view draws from a thread of its own

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "replace")
        with self._lock:
            self._send()
            if len(self._waiting) + len(data) <= self._room:
                self._waiting += data
            else:
                self._dropped += len(data)
            self._send()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._send()

    def drain(self, patience: float = LAST_PATIENCE) -> None:
        """Writes what is kept; gives up when the reader takes nothing for `patience` seconds."""
        taken = time.monotonic()
        with self._lock:
            while self._waiting and time.monotonic() - taken < patience:
                before = len(self._waiting)
                self._wait(0.1)
                self._send()
                if len(self._waiting) < before:
                    taken = time.monotonic()

    def _send(self) -> None:
        """Writes as much as goes without waiting."""
        while self._waiting:
            # So much goes into a pipe at once, or nothing does.
            piece = bytes(self._waiting[: select.PIPE_BUF])
            try:
                if self._own is None and not self._wait(0.0):
                    return
                written = os.write(self._number if self._own is None else self._own, piece)
            except BlockingIOError:
                return
            except OSError:  # nobody reads it, or it has no room
                self._waiting.clear()
                return
            del self._waiting[:written]
            if not self._waiting and self._dropped:
                told = f"\n[{self._dropped} bytes were dropped here: they were not read]\n"
                self._waiting += told.encode(self._encoding, "replace")
                self._dropped = 0

    def _wait(self, seconds: float) -> bool:
        """Whether it can be written to by then."""
        poll = select.poll()
        poll.register(self._number, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))


def guard_output() -> None:
    """From now on this process prints through streams that can't hurt it. Streams that somebody has
    put in their place (a notebook, a test) are left alone."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _guarded(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _guarded(sys.stderr)


def drain_output() -> None:
    """Before the process ends: what readers that are behind can still take."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, OutputStream):
            stream.drain()


def open_missing_streams() -> None:
    """A process may be started without some of its standard streams (`>&-`). The next files that it
    opens would get their numbers, and what is printed would end up in them."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # that was the lowest number that was free
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()


def _guarded(stream: TextIO) -> TextIO:
    try:
        stream.flush()
        return cast(TextIO, OutputStream(stream))
    except (OSError, ValueError):  # it is closed already
        return _nowhere()


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123


def _open_nonblocking(number: int) -> int | None:
    """Another way into the same pipe or terminal: whoever shares the first would be surprised if it
    no longer blocked. None where there is none, as for a socket."""
    kind = os.fstat(number).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)):
        return None
    try:
        return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
