"""A rank's heartbeat: where it is in its work, written where its launcher can always read it.

The place is memory that both processes share, 72 bytes a rank. A rank that is stopped, or whose
interpreter is locked, can't answer a question; but what it wrote last is still there, and that it
writes no more tells the rest. A reader may catch a slot half written: it looks again soon, and acts
only on a heartbeat that stands still.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from shardtune.core.phase_clock import PhaseClock

Phase = Literal[
    "start", "data", "forward", "backward", "collective", "update", "evaluate", "save", "finish",
    "compile", "log",
]  # fmt: skip
PHASES: tuple[Phase, ...] = get_args(Phase)
IN_A_STEP = frozenset({"data", "forward", "backward", "collective", "update", "log"})

# beats, those within the step, step, phase, rows and width of the micro-batch; when the phase
# began, seconds of data and of forward passes so far
_SLOT = struct.Struct("<6q3d")
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class Beat:
    """What a rank's heartbeat says: what it wrote last."""

    beats: int = 0
    """How often it has written."""
    within: int = 0
    """How often since its step began."""
    step: int = 0
    """The step that it works on; 0 before the first."""
    phase: Phase = "start"
    rows: int = 0
    width: int = 0
    """The micro-batch in work: so many rows of so many tokens, padding included."""
    since: float = 0.0
    """When the phase began, by the machine's monotonic clock."""
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    """What it spent so far on its own, not waiting for others."""

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else "the start"


class Heartbeat:
    """The writing end of a heartbeat. Without a place to write to it beats for itself."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, rank: int = 0) -> None:
        self._memory = bytearray(_SLOT.size) if memory is None else memory
        self._offset = 0 if memory is None else rank * _SLOT.size
        self._beats = self._within = self._step = self._rows = self._width = 0
        self._phase: Phase = "start"
        self._since = time.monotonic()
        self._data = self._forward = 0.0
        self._compiling = 0
        self._interrupted: Phase = "start"
        self.clock: PhaseClock | None = None
        """Told how long each phase took."""

    def begin(self, step: int) -> None:
        """A step is next, and its data first."""
        self._step, self._within = step, 0
        self.enter("data")

    def forward(self, rows: int, width: int) -> None:
        """The forward pass of a micro-batch begins."""
        self._rows, self._width = rows, width
        self.enter("forward")

    def enter(self, phase: Phase) -> None:
        """One phase ends, the next begins; the same one again is a sign of life."""
        self._within += 1
        self._write(phase)

    def compile_began(self, *_: object) -> None:
        """A compiler interrupts whatever it is: for another shape, in any step."""
        if self._compiling == 0:
            self._interrupted = self._phase
            self._write("compile")
        self._compiling += 1

    def compile_ended(self, *_: object) -> None:
        self._compiling -= 1
        if self._compiling == 0:
            self._write(self._interrupted)

    def _write(self, phase: Phase) -> None:
        now = time.monotonic()
        if self._phase == "forward":
            self._forward += now - self._since
        elif self._phase == "data":
            self._data += now - self._since
        if self.clock is not None:
            self.clock.add(self._phase, now - self._since)
        self._phase, self._since = phase, now
        self._beats += 1
        _SLOT.pack_into(
            self._memory, self._offset, self._beats, self._within, self._step, _NUMBER[phase],
            self._rows, self._width, now, self._data, self._forward,
        )  # fmt: skip

    @property
    def step(self) -> int:
        return self._step


class Heartbeats:
    """The reading end: the heartbeats of all ranks of a run, in nameless shared memory."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.file = _nameless_file()
        os.ftruncate(self.file, ranks * _SLOT.size)
        self._memory = mmap.mmap(self.file, ranks * _SLOT.size)

    def read(self, rank: int) -> Beat:
        found = _SLOT.unpack_from(self._memory, rank * _SLOT.size)
        beats, within, step, phase, *rest = found
        return Beat(beats, within, step, PHASES[phase], *rest)

    def slots(self, ranks: range) -> bytes:
        """What these ranks wrote last, to be shown on another machine."""
        return self._memory[ranks.start * _SLOT.size : ranks.stop * _SLOT.size]

    def put(self, first: int, slots: bytes) -> None:
        """Takes over what the ranks from `first` on wrote on another machine."""
        self._memory[first * _SLOT.size : first * _SLOT.size + len(slots)] = slots

    def close(self) -> None:
        self._memory.close()
        os.close(self.file)


def open_heartbeat(file: int, rank: int, ranks: int) -> Heartbeat:
    """The heartbeat of a rank that inherited the open file; it is of no further use then."""
    global _own
    memory = mmap.mmap(file, ranks * _SLOT.size)
    os.close(file)
    _own = Heartbeat(memory, rank)
    return _own


_own = Heartbeat()


def own_heartbeat() -> Heartbeat:
    """This process's heartbeat, for what happens far from whoever has opened it: compilers."""
    return _own


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, this process may take its time."""
    heartbeat = own_heartbeat()
    heartbeat.compile_began()
    try:
        yield
    finally:
        heartbeat.compile_ended()


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardtune-heartbeat")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
