"""A limit of time and memory around a chat template.

A template is a program of somebody else. A loop in a loop in a loop takes longer than anybody
waits, without ever leaving its sandbox.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import jinja2

from shardtune.errors import DataError, Problem

RENDER_SECONDS = 10.0
"""For one conversation, thousands of times what a template takes."""
RENDER_SECONDS_EACH = 0.05
"""For each further one of a batch; a usual template takes a thousandth."""
RENDER_BYTES = 4 << 30
"""That a process may grow by meanwhile; a batch's texts have some megabytes."""
_TICK = 0.1

TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip
"""What a template may raise when a conversation isn't to its liking, on purpose or because it looks
for a key that isn't there."""


class _Overrun(BaseException):
    """Raised in a thread that renders, from outside. No handler of a template may keep it."""


@contextmanager
def render_limit(conversations: int = 1) -> Iterator[None]:
    """DataError in a block that takes too long or too much memory.

    A signal interrupts the main thread of a Unix process, and another thread looks after the rest.
    Both wait for the next instruction of Python: a template's loop has many.
    """
    seconds = RENDER_SECONDS + RENDER_SECONDS_EACH * (conversations - 1)
    begun, before = time.monotonic(), _resident()

    def overrun() -> str:
        if time.monotonic() - begun > seconds:
            return f"took more than {seconds:.0f} s for {conversations} conversations"
        if _resident() - before > RENDER_BYTES:
            return f"took more than {RENDER_BYTES >> 30} GiB of memory"
        return ""

    main = threading.current_thread() is threading.main_thread()
    with _by_signal(overrun) if main and os.name == "posix" else _by_thread(overrun):
        yield


@contextmanager
def _by_signal(overrun: Callable[[], str]) -> Iterator[None]:
    def look(number: int, frame: FrameType | None) -> None:
        if told := overrun():
            _refuse(told)

    handler = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _by_thread(overrun: Callable[[], str]) -> Iterator[None]:
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    rendering = ctypes.c_ulong(threading.get_ident())
    ended, lock, found = threading.Event(), threading.Lock(), [""]

    def watch() -> None:
        while not (found[0] or ended.wait(_TICK)):
            if told := overrun():
                with lock:
                    if not ended.is_set():
                        found[0] = told
                        raise_in(rendering, ctypes.py_object(_Overrun))

    threading.Thread(target=watch, name="render limit", daemon=True).start()
    try:
        try:
            yield
        finally:
            with lock:
                ended.set()
            raise_in(rendering, None)  # what was raised and hasn't come yet must not come later
    except _Overrun:
        _refuse(found[0])


def _refuse(what: str) -> NoReturn:
    fix = "data.chat_template: another one, as a file or by name; this one loops, or is no template"
    raise DataError(Problem("the chat template", what, fix)) from None


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system doesn't say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
