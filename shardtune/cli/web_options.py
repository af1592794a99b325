"""What the commands that listen share: the address, the API key, the packages of their extra."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardtune.errors import LaunchRefused, Problem

if TYPE_CHECKING:
    from shardtune.web.http_guard import AccessRules

API_KEY = "SHARDTUNE_API_KEY"
"""Environment variable: what clients must send as their API key."""
_PACKAGES = ("starlette", "uvicorn")


def add_address(command: argparse.ArgumentParser, port: int) -> None:
    """Where to listen."""
    command.add_argument(
        "--host", default="127.0.0.1", help=f"address (127.0.0.1); others need {API_KEY}"
    )
    told = f"port ({port}); 0 takes a free one"
    command.add_argument("--port", type=_port, default=port, help=told)


def _port(word: str) -> int:
    if not (word.isascii() and word.isdigit() and int(word) < 2**16):
        raise argparse.ArgumentTypeError(f"is {word[:60]!r}; it must be from 0 to 65535")
    return int(word)


def access_rules(host: str) -> AccessRules:
    """Who may ask at this address; LaunchRefused where others could, and no key is set."""
    from shardtune.web.http_guard import AccessRules, is_loopback

    key, loopback = os.environ.get(API_KEY) or None, is_loopback(host)
    if not loopback and key is None:
        fact = "others can reach this address, and no API key is set"
        fix = f"set {API_KEY} to a long random word, or leave --host out"
        raise LaunchRefused(Problem(f"--host {host}", fact, fix))
    return AccessRules(key, loopback)


def require_packages(command: str) -> None:
    """Names what isn't installed, and the extra that brings it."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        fact = f"it needs {' and '.join(missing)}"
        raise LaunchRefused(Problem(f"shardtune {command}", fact, "pip install 'shardtune[serve]'"))
