"""The guard of the quick loop sees every way in which a test can start a process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests import processes

pytestmark = pytest.mark.process


def _nothing() -> None:
    pass


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _by_multiprocessing(method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=_nothing)
    process.start()
    process.join()


WAYS = {
    "subprocess.Popen": lambda: subprocess.run([sys.executable, "-S", "-c", ""], check=True),
    "os.posix_spawn": lambda: os.waitpid(
        os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], os.environ), 0
    ),
    "os.system": lambda: os.system("true"),
    "os.fork": _fork,
    "multiprocessing": lambda: _by_multiprocessing("spawn"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork beside threads
def test_a_test_that_starts_a_process_must_say_so(way: str) -> None:
    processes.forget()
    assert processes.fault("test_x") == ""
    start: Callable[[], object] = WAYS[way]
    start()
    said = processes.fault("test_x")
    assert said.startswith(f"test_x starts a process ({way}")
    assert said.endswith("write @pytest.mark.process over it, or let it do without")
