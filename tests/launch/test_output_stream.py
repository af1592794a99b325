"""Standard output whose reader goes away, stops reading or has no room: no write waits or fails."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from shardtune.launch.followed_log import FollowedLog
from shardtune.launch.output_stream import OutputStream

SMALL = 4096  # bytes that the pipe holds
LINE = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A small pipe: the end to read from, and the stream that writes to it."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, SMALL)
    with os.fdopen(writes, "w", encoding="utf-8") as stream:
        yield reads, stream
    os.close(reads)


def read_all(file: int) -> bytes:
    os.set_blocking(file, False)
    found = b""
    while True:
        try:
            piece = os.read(file, SMALL)
        except BlockingIOError:
            return found
        if not piece:
            return found
        found += piece


def test_a_pipe_that_nobody_reads_keeps_no_writer_waiting(pipe: tuple[int, TextIO]) -> None:
    reads, writes = pipe
    stream = OutputStream(writes)
    begun = time.monotonic()
    for _ in range(200):  # five times what the pipe holds
        stream.write(LINE)
    assert time.monotonic() - begun < 1.0
    assert os.get_blocking(writes.fileno())  # for whoever shares it
    found = b""
    while piece := read_all(reads):  # nothing was lost meanwhile
        found += piece
        stream.flush()
    assert found.decode() == LINE * 200


def test_what_is_too_much_is_dropped_and_told(pipe: tuple[int, TextIO]) -> None:
    reads, writes = pipe
    stream = OutputStream(writes, room=1000)
    for _ in range(60):
        stream.write(LINE)
    found = b""
    while piece := read_all(reads):
        found += piece
        stream.flush()
    dropped = 6000 - found.decode().count(LINE) * 100
    assert dropped > 0
    assert f"[{dropped} bytes were dropped here: they were not read]" in found.decode()


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, TextIO]) -> None:
    reads, writes = pipe
    stream = OutputStream(writes)
    hole = os.open(os.devnull, os.O_RDONLY)
    os.dup2(hole, reads)  # the only reading end is gone
    os.close(hole)
    with pytest.raises(BrokenPipeError):
        os.write(writes.fileno(), b"as anybody else would see")
    assert stream.write("nobody hears this\n") == 18
    stream.drain()


def test_a_full_disk_is_no_error() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        stream = OutputStream(full)
        print("no room for this", file=stream, flush=True)
        stream.drain()


def test_the_end_waits_for_a_reader_that_reads_and_for_no_other(pipe: tuple[int, TextIO]) -> None:
    _, writes = pipe
    stream = OutputStream(writes)
    stream.write(LINE * 200)
    begun = time.monotonic()
    stream.drain(patience=0.3)
    assert 0.3 <= time.monotonic() - begun < 2.0


def test_a_log_is_shown_as_it_grows(tmp_path: Path) -> None:
    path, shown = tmp_path / "rank-0.log", tmp_path / "shown"
    log = FollowedLog(path)
    with shown.open("w", encoding="utf-8") as stream:
        log.show(stream)  # not there yet
        with path.open("wb") as file:
            for piece in (b"one\ntw", b"o \xe2\x82", b"\xac\n"):  # cut inside a character
                file.write(piece)
                file.flush()
                log.show(stream)
    log.close()
    assert shown.read_text("utf-8") == "one\ntwo €\n"
