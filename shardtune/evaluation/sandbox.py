"""Runs code that a model wrote: a child process without network, with limits, in an empty folder.

It keeps a careless program from doing harm. It is no wall against a clever one: who evaluates
models that may be hostile runs all of it in a virtual machine.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import IO, Literal

from shardtune.errors import JobError, Problem

Outcome = Literal["passed", "failed", "timeout", "memory"]
_MIB = 2**20
_KEPT_BYTES = 4000  # of what a program says
_LIMITS = """\
import json, os, resource, sys, types

def run(seconds, memory, verdict):
    given = json.load(sys.stdin)
    for what, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 2**24), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))
    sys.argv = ["answer.py"]
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # where dataclasses and pickle look a class up
    exec(compile(given["code"], "answer.py", "exec"), module.__dict__)
    module.__name__, sys.modules["__main__"] = "__main__", module
    exec(compile(given["tests"], "tests.py", "exec"), module.__dict__)
    os.write(verdict, given["nonce"].encode())

run(*map(int, sys.argv[1:]))
"""


@dataclass(frozen=True)
class CodeResult:
    """How a program ended."""

    outcome: Outcome
    detail: str = ""
    """The last line of what it said."""


def run_code(code: str, tests: str, *, seconds: float, memory_mib: int) -> CodeResult:
    """Runs Python code, and then its tests in the same module. It has passed if the last test ends
    without an error: a nonce is written then, so code that exits early has failed.

    The code is imported rather than run as a script: `__name__` is `__main__` for the tests only.
    """
    nonce = secrets.token_hex(16)
    given = json.dumps({"code": code, "tests": tests, "nonce": nonce})
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as verdict,
        tempfile.TemporaryFile() as said,  # a file: its size is limited, a pipe's flow isn't
    ):
        limits = [int(seconds) + 1, memory_mib * _MIB, verdict.fileno()]
        child = subprocess.Popen(
            [*_without_network(), sys.executable, "-I", "-c", _LIMITS, *map(str, limits)],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=[verdict.fileno()],
            start_new_session=True,  # what it starts is killed with it
        )
        try:
            child.communicate(given.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return CodeResult("timeout", f"not done after {seconds:g} s")
        finally:
            _kill(child)
        verdict.seek(0)
        reached_end = verdict.read(len(nonce)) == nonce.encode()
        last = _last_line(said)
    if child.returncode == 0:
        early = CodeResult("failed", "it exited before its tests had ended")
        return CodeResult("passed") if reached_end else early
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return CodeResult("timeout", f"more than {seconds:g} s of processor time")
    return CodeResult("memory" if "MemoryError" in last else "failed", last)


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT_BYTES))
    lines = file.read(_KEPT_BYTES).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and all of its session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()
    if child.stdin:
        child.stdin.close()


@cache
def _without_network() -> tuple[str, ...]:
    """The command that takes the network away; with a namespace of processes as well, so that none
    outlives the program. Empty where the system allows no namespaces."""
    command = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return ()
    return command if tried.returncode == 0 else ()


def has_no_network() -> bool:
    """Whether programs are really cut off from the network on this system."""
    return bool(_without_network())


def require_no_network() -> None:
    """Refuses to run code with network."""
    if not has_no_network():
        fact = "this system gives a process no network namespace, so code would have network"
        fix = "install util-linux's unshare, and allow user namespaces (or run as root)"
        raise JobError(Problem("evaluate: code", fact, fix))
