"""An installed package that brings a tracker: its sink does whatever may go wrong."""

from __future__ import annotations

from pathlib import Path

SECTION = '''
from typing import ClassVar, Literal

from shardtune.core.tracker import TrackerBase


class Hostile(TrackerBase):
    """A tracker that does harm, as far as it can."""

    type: Literal["hostile"] = "hostile"
    sink: ClassVar[str] = "hostile_tracker.sink:HostileSink"
    how: Literal["refuse", "raise", "hang", "spin", "fill", "chatter", "kill", "listen"] = "raise"
'''
SINK = """
import itertools
import os
import signal
import subprocess
import sys
import time


class HostileSink:
    id = "hostile"

    def __init__(self, section, run):
        self.how, self.folder, self.seen = section.how, run.folder, []
        if self.how == "refuse":
            raise ConnectionError("no route to https://me:hunter22@tracker/x")

    def log(self, step, values, time_):
        self.seen.append(step)
        if step < 3 or self.how == "listen":
            return
        if self.how == "raise":
            raise RuntimeError(f"key {os.environ['HOSTILE_API_KEY']} is not valid")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        for number in itertools.count():
            if self.how == "fill":
                (self.folder / f"{number}.bin").write_bytes(bytes(1 << 20))
            elif self.how == "chatter":
                print("x" * 1000, os.environ["HOSTILE_API_KEY"], flush=True)

    def note(self, step, name, text):
        pass

    def table(self, step, name, columns, rows):
        pass

    def flush(self):
        pass

    def close(self, *, finished):
        (self.folder / "seen.txt").write_text(" ".join(map(str, self.seen)))
"""
ENTRY = "[shardtune.trackers]\nhostile = hostile_tracker.section:Hostile\n"


def install_hostile(folder: Path) -> Path:
    """Makes the package; returns what has to be on the path of Python."""
    site = folder / "site"
    package, about = site / "hostile_tracker", site / "hostile_tracker-1.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "section.py").write_text(SECTION, encoding="utf-8")
    (package / "sink.py").write_text(SINK, encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-tracker\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY, encoding="utf-8")
    return site
