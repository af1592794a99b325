"""vLLM's own server as a child process: started, watched until it answers, stopped with us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.request import ProxyHandler, build_opener

from shardtune.core.host.parent_death import die_with_parent
from shardtune.errors import LaunchError, Problem

_MISSES = 3  # looks in a row without an answer after which it counts as hung
_FIX = "its own words stand above; --engine transformers serves without it"
_DIRECT = build_opener(ProxyHandler({}))  # a proxy of the environment doesn't reach our loopback


@dataclass(frozen=True)
class Patience:
    """How long vLLM may take, and how often it is looked at."""

    start_seconds: float = 1800.0
    """Until its first answer; it loads and compiles for minutes."""
    told_seconds: float = 30.0
    """Between two words about a start that goes on."""
    starting_look: float = 1.0
    """Seconds between two looks at its health while it starts."""
    serving_look: float = 10.0
    """The same once it has answered."""
    drain_seconds: float = 30.0
    """For what runs when it is to end."""


def run_vllm(
    words: Sequence[str],
    host: str,
    port: int,
    *,
    environment: Mapping[str, str],
    patience: Patience,
    ready: Callable[[str], None],
    starting: Callable[[float], None],
) -> None:
    """Serves until a signal comes, which ends vLLM as well; `ready` hears the address once /health
    answers, `starting` now and then for how many seconds it has not. LaunchError if vLLM ends by
    itself, starts for too long, or stops answering."""
    port = port or _free_port(host)
    address = f"http://{_reachable(host)}:{port}"
    ours = os.getpid()
    with _stop_asked() as stop:
        process = subprocess.Popen(
            [*words, "--host", host, "--port", str(port)],
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C comes to us, and we end it
            preexec_fn=lambda: die_with_parent(ours),
        )
        try:
            if _started(process, f"{address}/health", stop, patience, starting):
                ready(address)
                _watch(process, f"{address}/health", stop, patience)
        finally:
            _end(process, patience.drain_seconds)


def _started(
    process: subprocess.Popen[bytes],
    health: str,
    stop: threading.Event,
    patience: Patience,
    starting: Callable[[float], None],
) -> bool:
    """Returns once it answers; False if it is to stop before."""
    begun = told = time.monotonic()
    while not stop.wait(patience.starting_look):
        _require_alive(process, "before it answered")
        if _is_healthy(health):
            return True
        now = time.monotonic()
        if now - begun > patience.start_seconds:
            fact = f"{health} has not answered in {now - begun:.0f} s, and it has not ended"
            raise LaunchError(Problem("vllm", fact, f"give --start-timeout more; {_FIX}"))
        if now - told >= patience.told_seconds:
            told = now
            starting(now - begun)
    return False


def _watch(
    process: subprocess.Popen[bytes], health: str, stop: threading.Event, patience: Patience
) -> None:
    misses = 0
    while not stop.wait(patience.serving_look):
        _require_alive(process, "while it served")
        misses = 0 if _is_healthy(health) else misses + 1
        if misses == _MISSES:
            fact = f"{health} has not answered {misses} times in a row"
            raise LaunchError(Problem("vllm", fact, _FIX))


def _require_alive(process: subprocess.Popen[bytes], when: str) -> None:
    if (code := process.poll()) is not None:
        raise LaunchError(Problem("vllm", f"ended with code {code} {when}", _FIX))


def _is_healthy(health: str) -> bool:
    try:
        with _DIRECT.open(health, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """vLLM finishes what runs after SIGTERM; it and its workers are killed if that takes long."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM, as long as the block lasts."""
    asked = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reachable(host: str) -> str:
    """Where this machine asks a server that listens there."""
    with suppress(ValueError):  # a name
        if (found := ip_address(host)).is_unspecified:
            return "127.0.0.1" if found.version == 4 else "[::1]"
    return f"[{host}]" if ":" in host else host


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
