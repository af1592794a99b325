"""What is there for a moment is seen; what a file brings along is not."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest

from tests.highest import highest_rise

MIB = 1 << 20
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc"
)


def test_a_copy_for_a_moment_is_seen() -> None:
    with highest_rise() as rise:
        some = bytearray(b"x") * (64 * MIB)
        time.sleep(0.02)
        del some
        time.sleep(0.02)
    assert 60 * MIB < rise.bytes < 80 * MIB


def test_a_file_that_is_mapped_is_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (64 * MIB))
    with highest_rise() as rise, file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(mapped[:: mmap.PAGESIZE]) == 64 * MIB // mmap.PAGESIZE * ord("x")
        time.sleep(0.02)
        mapped.close()
    assert rise.bytes < 8 * MIB
