"""Probes of kernels that passed, remembered for this machine: a kernel that was right once is right
until its package, torch or the GPU is another.

Only what passed is kept. What failed is tried again by the next run: it may have failed for want of
memory, or of a package that is there by then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from shardtune.core.files.cache import cache_dir


def probe_key(packages: Iterable[str], **facts: object) -> dict[str, str]:
    """What a probe's result depends on: versions of `packages`, and `facts`."""
    found = {name: str(value) for name, value in facts.items()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def has_passed(key: dict[str, str]) -> bool:
    """Whether the probe of that key has passed on this machine before."""
    try:
        return bool(json.loads(_file(key).read_text(encoding="utf-8")) == key)
    except (OSError, ValueError):
        return False


def remember(key: dict[str, str]) -> None:
    """That it has passed. A cache that can't be written costs the next run its probe."""
    file = _file(key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")


def _file(key: dict[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "probes" / f"{name}.json"
