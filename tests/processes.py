"""Which tests start processes: the mark `process`, derived where possible, and what keeps it true.

`make quick` leaves out what is marked. Marked are, at collection, tests that reach a call which
starts a process through the code of `tests/` (`on_ranks`, `subprocess.run`); one that does so
through the package itself says `@pytest.mark.process`. A test without the mark that starts a
process fails in `make quick`, so that the quick loop can't become slow unseen.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

EVENTS = {
    "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.spawn",
    "os.posix_spawn",
}  # fmt: skip
"""What Python tells an audit hook before it starts a process or becomes another one."""
STARTERS = {
    subprocess: {"run", "call", "check_call", "check_output", "Popen"},
    multiprocessing: {"Process", "Pool", "get_context"},
    os: {"system", "fork", "forkpty", "posix_spawn", "posix_spawnp", "execv", "execve"},
}
"""Calls by which the code of the tests starts processes."""
OF_THE_PACKAGE = {"shardtune.launch.supervisor.run_local"}
"""Functions of the package that always start some."""
QUESTIONS = {"git", "ldconfig", "nvidia-smi", "uname"}
"""Commands that only ask the machine something and end at once: they don't count."""
OURS = "tests."
"""The code that is followed, by the beginning of its modules' names."""

_started: list[str] = []


def watch() -> None:
    """Begins to record, for as long as this process runs."""
    own = os.getpid()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and os.getpid() == own:
            command = arguments[1] if event == "subprocess.Popen" else arguments[:1]
            words = command if isinstance(command, str) else " ".join(map(str, command))
            if os.path.basename(words.split(" ", 1)[0]) in QUESTIONS:  # noqa: PTH119
                return
            _started.append(f"{event} {words[:200]}".strip())

    sys.addaudithook(hear)
    start = BaseProcess.start

    def recorded(process: BaseProcess) -> None:  # multiprocessing raises no event for its servers
        _started.append(f"multiprocessing {process.name}")
        start(process)

    BaseProcess.start = recorded  # type: ignore[method-assign]


def forget() -> None:
    _started.clear()


def fault(name: str) -> str:
    """What is wrong with a test without the mark that has just ended; nothing where nothing is."""
    if not _started:
        return ""
    return (
        f"{name} starts a process ({_started[0]}) and isn't marked so:"
        " write @pytest.mark.process over it, or let it do without"
    )


def reaches_a_start(item: pytest.Function, seen: dict[Callable[..., Any], bool]) -> bool:
    """Whether a test, a fixture or a parameter of it leads to one of the starters."""
    fixtures = [
        fixture.func
        for fixtures in item._fixtureinfo.name2fixturedefs.values()
        for fixture in fixtures
    ]
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else []
    roots = [item.function, *fixtures, *parameters]
    return any(_reaches(inspect.unwrap(root), seen) for root in roots if callable(root))


def _reaches(function: Any, seen: dict[Callable[..., Any], bool]) -> bool:
    if not _is_ours(function):
        return False
    if function not in seen:
        seen[function] = False  # while it is being followed: a function may call itself
        seen[function] = any(used is True or _reaches(used, seen) for used in _used(function))
    return seen[function]


def _is_ours(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, FunctionType | type) and module.startswith(OURS)


def _used(function: FunctionType | type) -> Iterator[Any]:
    """The functions and classes that the code of one names; `True` for a starter."""
    if isinstance(function, type):
        yield from (each for each in vars(function).values() if isinstance(each, FunctionType))
        return
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            if STARTERS.get(value, set()) & names:
                yield True
            if value.__name__.startswith(OURS):
                yield from (vars(value)[inner] for inner in names & vars(value).keys())
        elif isinstance(value, BaseContext):
            yield "Process" in names
        elif f"{getattr(value, '__module__', '')}.{name}" in OF_THE_PACKAGE:
            yield True
        else:
            yield inspect.unwrap(value) if callable(value) else value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
