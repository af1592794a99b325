"""What the ranks of a run printed, and their last stacks, as the launcher keeps them in `logs/`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardtune.core.files.regular_file import open_regular, read_regular
from shardtune.core.record import Record
from shardtune.launch.error_file import parse_error_report

LARGEST_PAGE = 1 << 16  # bytes of a log that are sent at once
_LARGEST_STACK = 1 << 18
_ATTEMPT = re.compile(r"attempt-(\d{1,9})")
_LOG = re.compile(r"rank-(\d{1,9})\.log")
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class RankLog(Record):
    """A log that is there."""

    attempt: int
    rank: int
    bytes: int


class LogPage(Record):
    """A part of a log, of whole lines where it can be."""

    text: str
    begin: int
    """Where it begins in the file; 0 is the beginning."""
    end: int
    bytes: int
    """Of the whole file."""


class RankStack(Record):
    """Where a rank was when it was asked last, or why it ended."""

    attempt: int
    rank: int
    kind: str
    """`stack` of one that hung, `error` of one that failed."""
    text: str


def rank_logs(run: Path) -> tuple[RankLog, ...]:
    """The logs of all attempts, the last attempt first."""
    found = []
    for attempt, folder in _attempts(run):
        for entry in _files(folder):
            if match := _LOG.fullmatch(entry.name):
                size = entry.stat(follow_symlinks=False).st_size
                found.append(RankLog(attempt=attempt, rank=int(match[1]), bytes=size))
    return tuple(sorted(found, key=lambda log: (-log.attempt, log.rank)))


def log_page(run: Path, attempt: int, rank: int, before: int | None = None) -> LogPage:
    """The last part of a log, or that which ends at `before`; OSError where there is none."""
    folder = dict(_attempts(run)).get(attempt)
    if folder is None:
        raise FileNotFoundError(f"there is no attempt {attempt}")
    with open_regular(folder / f"rank-{rank}.log", follow_links=False) as file:
        size = os.fstat(file.fileno()).st_size
        end = size if before is None else min(before, size)
        begin = max(0, end - LARGEST_PAGE)
        file.seek(begin)
        data = file.read(end - begin)
    cut = data.find(b"\n") + 1 if begin else 0
    text = readable(data[cut:].decode("utf-8", "replace"))
    return LogPage(text=text, begin=begin + cut, end=end, bytes=size)


def rank_stacks(run: Path) -> tuple[RankStack, ...]:
    """The stacks and errors of the last attempt that has any."""
    for attempt, folder in sorted(_attempts(run), reverse=True):
        found = sorted(_stacks(attempt, folder), key=lambda stack: (stack.rank, stack.kind))
        if found:
            return tuple(found)
    return ()


def _stacks(attempt: int, folder: Path) -> Iterator[RankStack]:
    for entry in _files(folder):
        match = re.fullmatch(r"(stack|error)-(\d{1,9})\.(txt|json)", entry.name)
        if match is None:
            continue
        with suppress(OSError):
            raw = read_regular(Path(entry.path), _LARGEST_STACK, follow_links=False)
            text = raw.decode("utf-8", "replace")
            if match[1] == "error":
                report = parse_error_report(text)
                said = "" if report is None else "\n".join(map(str, report.problems))
                text = said or (report.traceback if report else "")
            if text.strip():
                shown = readable(text).strip("\n")
                yield RankStack(attempt=attempt, rank=int(match[2]), kind=match[1], text=shown)


def _attempts(run: Path) -> Iterator[tuple[int, Path]]:
    with suppress(OSError), os.scandir(run / "logs") as entries:
        for entry in entries:
            match = _ATTEMPT.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                yield int(match[1]), Path(entry.path)


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))


def readable(text: str) -> str:
    """The text without what drives a terminal; of a line that was drawn again, its last state."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # JSON can hold half a surrogate pair
    lines = _ESCAPE.sub("", text.replace("\r\n", "\n")).split("\n")
    return _CONTROL.sub("", "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines))
