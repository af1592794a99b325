"""`train --json`: the lines of `metrics.jsonl` on standard output as they come, then the report.

Whoever starts the ranks follows the file, so that nothing else can come between the lines: all that
is printed besides goes to standard error.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

from shardtune.checkpoint.run_dir import RunDir

LOOKED_AT = 0.5  # seconds between two looks at the file


@contextmanager
def printing_json(directory: Path) -> Iterator[None]:
    """As long as a run in `directory` is started and watched inside the block. Its report follows
    its metrics, if it came to an end."""
    out, over = sys.stdout, threading.Event()
    report = RunDir(directory).read_report()
    thread = threading.Thread(target=_follow, args=(directory, out, over), daemon=True)
    with redirect_stdout(sys.stderr):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
    found = RunDir(directory).read_report()
    if found is not None and found != report:
        _print(out, json.dumps({"kind": "report", **json.loads(found.to_json())}))


def _follow(directory: Path, out: TextIO, over: threading.Event) -> None:
    """Prints lines until there are no more to come. An earlier run's, which may lie there when this
    one begins, are left out: it begins its log anew."""
    from shardtune.core.runs.metrics_log import follow

    position = follow(directory).position
    while True:
        last = over.wait(LOOKED_AT)
        found = follow(directory, position)
        position = found.position
        for line in found.lines:
            _print(out, line.to_json(ascii_only=True))
        if last and not found.lines:
            return


def _print(out: TextIO, line: str) -> None:
    with suppress(OSError):  # nobody reads it any more; the run goes on
        print(line, file=out, flush=True)
