"""How fast a link between two nodes is, and how far their clocks are apart, over plain TCP.

No torch is needed: a doctor has to work where a run doesn't.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass

STREAMS = 4  # one connection rarely fills a fast link
WARM_UP, WINDOW_SECONDS = 0.5, 0.5  # seconds: what was queued before must not count
WINDOWS = 4
"""The second best counts. On a busy machine a link is at times not filled; and a reader that had to
wait for its core finds in the next window what was queued meanwhile: more than the link carries."""
PINGS = 20
SEND_BYTES = 1 << 18
SOCKET_TIMEOUT = 30.0  # seconds without a byte after which an end gives up
_TIME = struct.Struct("<d")


@dataclass(frozen=True)
class MeasuredLink:
    """What one node measured on the way to another."""

    source: int
    target: int
    gbps: float
    """10^9 bits of payload a second, in this direction."""
    milliseconds: float
    """There and back, at best."""
    clock_seconds: float
    """How far the other clock is ahead."""


def receive(listener: socket.socket) -> None:
    """The far end: answers the pings, then takes what comes, until the near end is done."""
    listener.settimeout(SOCKET_TIMEOUT)
    control, _ = listener.accept()
    with control:
        control.settimeout(SOCKET_TIMEOUT)
        for _ in range(PINGS):
            _exactly(control, _TIME.size)
            control.sendall(_TIME.pack(time.time()))
        counts = [0] * STREAMS
        threads = []
        for number in range(STREAMS):
            stream, _ = listener.accept()
            threads.append(threading.Thread(target=_drain, args=(stream, counts, number)))
            threads[-1].start()
        time.sleep(WARM_UP)
        control.sendall(_TIME.pack(sorted(_rate(counts) for _ in range(WINDOWS))[-2]))
        for thread in threads:
            thread.join()


def _rate(counts: list[int]) -> float:
    """Bytes a second that come in during a window."""
    before, begun = sum(counts), time.perf_counter()
    time.sleep(WINDOW_SECONDS)
    return (sum(counts) - before) / (time.perf_counter() - begun)


def send(source: int, target: int, address: str, port: int) -> MeasuredLink:
    """The near end: pings, then sends as much as the link takes. What arrives is what counts."""
    with socket.create_connection((address, port), timeout=SOCKET_TIMEOUT) as control:
        trip, ahead = _ping(control)
        streams = [
            socket.create_connection((address, port), timeout=SOCKET_TIMEOUT)
            for _ in range(STREAMS)
        ]
        ended = threading.Event()
        threads = [threading.Thread(target=_fill, args=(each, ended)) for each in streams]
        for thread in threads:
            thread.start()
        try:
            control.settimeout(SOCKET_TIMEOUT)
            (rate,) = _TIME.unpack(_exactly(control, _TIME.size))
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    return MeasuredLink(source, target, rate * 8 / 1e9, trip * 1e3, ahead)


def _ping(control: socket.socket) -> tuple[float, float]:
    """The shortest time there and back, and the other clock's lead in that one."""
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found = []
    for _ in range(PINGS):
        sent = time.time()
        control.sendall(_TIME.pack(sent))
        (theirs,) = _TIME.unpack(_exactly(control, _TIME.size))
        came = time.time()
        found.append((came - sent, theirs - (sent + came) / 2))
    return min(found)


def _fill(stream: socket.socket, ended: threading.Event) -> None:
    piece = bytes(SEND_BYTES)
    with stream:
        try:
            while not ended.is_set():
                stream.sendall(piece)
        except OSError:  # the far end has gone
            return


def _drain(stream: socket.socket, counts: list[int], number: int) -> None:
    room = bytearray(SEND_BYTES)
    with stream:
        stream.settimeout(SOCKET_TIMEOUT)
        try:
            while count := stream.recv_into(room):
                counts[number] += count
        except OSError:
            return


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other end has gone")
        data += more
    return data
