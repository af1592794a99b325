"""The process of one tracker: follows a run's metrics.jsonl until the run's end.

It is told what to do in one line of JSON on its standard input, and that the run has ended by the
end of that input. What it prints, and what the tracker's library prints, goes to a log file without
secrets. It asks for nothing that a rank could want: it runs when a core is idle, is the first that
the kernel ends when memory is short, and sees no GPU.

    python -m shardtune.track.tracker_process
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from shardtune.core.host.parent_death import die_with_parent
from shardtune.core.redact import redact

FOLLOW_SECONDS = 1.0  # between two looks at metrics.jsonl
LARGEST_LOG = 1 << 20  # bytes; a tracker that prints without end fills no disk
FAILED = "failed: "
"""Begins the last line of the log of a tracker that failed."""
_STDIN, _STDOUT, _STDERR = 0, 1, 2


@dataclass(frozen=True)
class Order:
    """What a tracker's process is told."""

    run_dir: str
    run: str
    """The run's id."""
    label: str
    """What the tracker is called in the run directory."""
    section: dict[str, object]
    """Its section of the job."""
    config: dict[str, str | float | int | bool | None]
    """The values of the job by their dotted path."""
    parent: int

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> int:
    """Follows the run; returns the exit code."""
    step_back()
    order = Order(**json.loads(_read_line()))
    die_with_parent(order.parent)
    log = Path(order.run_dir) / "track" / f"{order.label}.log"
    with _output_to(log):
        try:
            _follow(order)
        except Exception as error:  # noqa: BLE001 - whatever a library may raise
            import traceback

            traceback.print_exc()
            told = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"{FAILED}{told}", flush=True)
            return 1
    return 0


def step_back() -> None:
    """Leaves cores, disk and memory to the ranks. Under SCHED_IDLE the kernel also puts what we
    write behind what others write. A session has a scheduling group of its own (autogroup), which
    would get as much as a rank's session, however low its processes are: that is lowered, too."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):  # not on macOS
        os.nice(19)
    for setting, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with suppress(OSError):
            Path("/proc/self", setting).write_text(value, encoding="ascii")
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


def step_forward(pid: int) -> None:
    """Takes back what `step_back` has left of the cores: the run is over, and somebody waits. Of
    the two only the group's share can be raised by everybody."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("0", encoding="ascii")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


def _follow(order: Order) -> None:
    from shardtune.config.trackers import tracker_of
    from shardtune.track.open_feed import open_feed

    section = tracker_of(order.section)
    _limit_files(section.disk_mib)
    with open_feed(section, Path(order.run_dir), order.run, order.label, order.config) as feed:
        while not _has_ended():
            feed.send_new()
        feed.finish()


def _limit_files(mib: int) -> None:
    """No file that we write can be larger; the folder as a whole is looked at by `watch.py`."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (mib << 20, mib << 20))


def _has_ended() -> bool:
    """Waits for the next look; True at the end of our input."""
    ready, _, _ = select.select([_STDIN], [], [], FOLLOW_SECONDS)
    return bool(ready)


def _read_line() -> bytes:
    """All of our input but its end, for which `select` waits later."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(_STDIN, 1 << 16)
        if not piece:
            sys.exit(1)
        data += piece
    return data


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """All that this process and its children print goes to a file, without secrets."""
    end, begin = os.pipe()
    for stream in (_STDOUT, _STDERR):
        os.dup2(begin, stream)
    os.close(begin)
    with path.open("ab", buffering=0) as log, os.fdopen(end, "rb") as printed:
        writer = threading.Thread(target=_copy_redacted, args=(printed, log), daemon=True)
        writer.start()
        try:
            yield
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            null = os.open(os.devnull, os.O_WRONLY)
            for stream in (_STDOUT, _STDERR):
                os.dup2(null, stream)
            writer.join(timeout=1.0)  # a child of the tracker's may still hold the other end


def _copy_redacted(printed: IO[bytes], log: IO[bytes]) -> None:
    written = 0
    for line in printed:
        text = redact(line.decode(errors="replace"), os.environ).encode()
        if written < LARGEST_LOG or text.startswith(FAILED.encode()):
            with suppress(OSError):
                log.write(text)
            written += len(text)


if __name__ == "__main__":
    os._exit(main())  # a library's threads and exit handlers can't keep it
