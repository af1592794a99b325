"""Two hosts on one machine: network namespaces, joined by a pair of virtual interfaces.

They share the file system, and nothing else: a process in one reaches the other over the link only,
which can be throttled (`tc`) or cut.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    interface: str
    address: str

    def ip(self, *words: str) -> None:
        _run("ip", "-n", self.namespace, *words)

    def start(
        self, *command: str, cwd: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A Python command on this host, as a person would start it there."""
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        settings = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(cwd / f"cache-{self.interface}"), "COLUMNS": "200",
        }  # fmt: skip
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, *command],
            cwd=cwd,
            env=inherited | settings | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def throttle(self, megabits: int) -> None:
        """What leaves this host from now on does so no faster."""
        shape = f"rate {megabits}mbit burst 256kb latency 100ms".split()
        words = ("qdisc", "replace", "dev", self.interface, "root", "tbf", *shape)
        _run("tc", "-n", self.namespace, *words)

    def cut(self) -> None:
        self.ip("link", "set", self.interface, "down")

    def mend(self) -> None:
        self.ip("link", "set", self.interface, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """The hosts; skips the test where they can't be made."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("two hosts need Linux and iproute2 (Debian: apt-get install iproute2)")
    mark = f"st{os.getpid()}"
    left = Host(f"{mark}-a", "left", "10.217.0.1")
    right = Host(f"{mark}-b", "right", "10.217.0.2")
    try:
        try:
            for host in (left, right):
                _run("ip", "netns", "add", host.namespace)
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip()
            pytest.skip(f"two hosts need the right to make network namespaces (root): {said}")
        peer = ("peer", "name", right.interface, "netns", right.namespace)
        left.ip("link", "add", left.interface, "type", "veth", *peer)
        for host in (left, right):
            host.ip("addr", "add", f"{host.address}/24", "dev", host.interface)
            host.ip("link", "set", host.interface, "up")
            host.ip("link", "set", "lo", "up")
        yield left, right
    finally:
        for host in (left, right):
            if Path("/run/netns", host.namespace).exists():
                _run("ip", "netns", "del", host.namespace)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
