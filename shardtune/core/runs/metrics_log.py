"""The log of a run's metrics, `metrics.jsonl`, read while it grows.

Nothing here is written, and nothing that lies in the file can raise. No torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shardtune.core.runs.metrics import MetricsLine, StepMetrics
from shardtune.core.files.regular_file import open_regular

MOST_READ = 1 << 26  # bytes of metrics that `follow` takes at once
MOST_TAIL = 1 << 20  # bytes in which a step is looked for: a line may account for 1,000 ranks

_LINE: TypeAdapter[MetricsLine] = TypeAdapter(MetricsLine)


@dataclass(frozen=True)
class LogPosition:
    """How far a log was read. A resumed run writes its log anew, as another file: `inode` tells."""

    inode: int = 0
    offset: int = 0


@dataclass(frozen=True)
class NewBytes:
    """What a log has gained since the last look, as whole lines that nobody has parsed."""

    data: bytes
    position: LogPosition
    """Where to go on."""
    unfinished: bool = False
    restarted: bool = False


@dataclass(frozen=True)
class NewLines:
    """What a log has gained since the last look."""

    lines: tuple[MetricsLine, ...]
    position: LogPosition
    """Where to go on."""
    bad: int = 0
    """Lines that can't be read."""
    unfinished: bool = False
    """A line has no end yet. In a run that is over it never gets one."""
    restarted: bool = False
    """The log is another file: what was read before is void, and these are all there are."""


def follow(run_dir: Path, position: LogPosition = LogPosition()) -> NewLines:
    """The lines of `metrics.jsonl` after `position`. One that has no end yet waits for the next
    call; at the end of a dead run it stays unread. A very long log comes in several calls."""
    found = read_new_bytes(run_dir, position)
    lines, bad = parse_lines(found.data)
    return NewLines(
        lines, found.position, bad, unfinished=found.unfinished, restarted=found.restarted
    )


def read_new_bytes(run_dir: Path, position: LogPosition) -> NewBytes:
    """What `follow` reads, before it is parsed: for who keeps no objects of 100,000 steps. The file
    is opened each time, which makes a network file system ask its server again."""
    try:
        with open_regular(run_dir / "metrics.jsonl", follow_links=False) as file:
            inode, size = _identity(file.fileno())
            same = inode == position.inode and position.offset <= size
            begin = position.offset if same else 0
            file.seek(begin)
            data = file.read(MOST_READ)
    except OSError:
        return NewBytes(b"", LogPosition(), restarted=position.offset > 0)
    whole = data[: data.rfind(b"\n") + 1]
    end = LogPosition(inode, begin + len(whole))
    torn, anew = len(whole) < len(data), not same and position.offset > 0
    return NewBytes(whole, end, unfinished=torn, restarted=anew)


def read_tail(run_dir: Path, most: int = 1 << 16) -> tuple[MetricsLine, ...]:
    """The last whole lines of `metrics.jsonl`, of its last `most` bytes: for a list of runs. Where
    no step is among them, of more: a line that accounts for many ranks is long."""
    try:
        with open_regular(run_dir / "metrics.jsonl", follow_links=False) as file:
            _, size = _identity(file.fileno())
            while True:
                file.seek(max(0, size - most))
                data = file.read(most)
                begin = data.find(b"\n") + 1 if size > most else 0
                lines, _ = parse_lines(data[begin : data.rfind(b"\n") + 1])
                has_step = any(isinstance(line, StepMetrics) for line in lines)
                if has_step or most >= min(size, MOST_TAIL):
                    return lines
                most = min(8 * most, MOST_TAIL)
    except OSError:
        return ()


def parse_lines(data: bytes) -> tuple[tuple[MetricsLine, ...], int]:
    """Lines of metrics, and how many can't be read."""
    read = [_line(line) for line in data.split(b"\n")[:-1]]
    found = tuple(line for line in read if line is not None)
    return found, len(read) - len(found)


def _line(data: bytes) -> MetricsLine | None:
    try:
        return _LINE.validate_json(data, extra="ignore")
    except ValidationError:
        return None


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_ino, found.st_size
