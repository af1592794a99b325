"""What a node has, as plain facts, and what follows from the facts of all of them.

A finding is one sentence with its fix. Facts travel between nodes as JSON.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtune.core.cache import cache_dir
from shardtune.core.machine import Machine

if TYPE_CHECKING:
    from shardtune.config.job import Job

GIB = 1 << 30
PACKAGES = (
    "torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "deepspeed",
    "bitsandbytes", "ray",
)  # fmt: skip
LITTLE_DISK, LITTLE_SHM, FEW_FILES = 10 * GIB, GIB, 4096
SHARED = "/dev/shm"  # noqa: S108 - a file system in memory, which NCCL uses
_SHOWN = ("Python", "torch", "transformers", "deepspeed")
CLOCK = 1.0  # seconds that clocks may be apart
_WHOLE = 64 << 20  # bytes of a file that are always hashed; of a larger one so many in samples
_SAMPLES = 64

Level = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """One sentence, and what to do about it where that isn't nothing."""

    level: Level
    place: str
    fact: str
    fix: str = ""


def local_facts(job: Job | None) -> dict[str, Any]:
    """This node, and how it sees the job's files."""
    machine = Machine.here()
    facts: dict[str, Any] = {
        "host": platform.node(),
        "versions": {"shardtune": _version("shardtune"), "Python": platform.python_version()}
        | {name: found for name in PACKAGES if (found := _version(name))},
        "driver": _driver(),
        "gpus": machine.gpus,
        "gpu": machine.gpu_name,
        "cores": machine.cores,
        "memory": machine.memory,
        "open_files": _open_files(),
        "shared_memory": _size(SHARED),
        "disk": {"cache": _free(cache_dir())},
    }
    if job is not None:
        directory = Path(job.save.directory).expanduser()
        facts["disk"]["save.directory"] = _free(directory)
        sources = (*job.data.train, *job.data.eval)
        facts["data"] = {source.label: _fingerprint(Path(source.path)) for source in sources}
        facts["model"] = _fingerprint(Path(job.model.name).expanduser())
    return facts


def findings(nodes: Sequence[dict[str, Any]], job: Job | None) -> list[Finding]:
    """What is to be said about these nodes; the first is node 0."""
    found = [*_equal(nodes)]
    for number, facts in enumerate(nodes):
        found += _alone(f"node {number}" if len(nodes) > 1 else "here", facts)
        if job is not None:
            found += _missing(f"node {number}" if len(nodes) > 1 else "here", facts, job)
    return found


def _equal(nodes: Sequence[dict[str, Any]]) -> list[Finding]:
    """Versions, GPUs and files that have to be the same everywhere."""
    if len(nodes) == 1:
        return []
    found = []
    kinds = {
        "versions": "install the same version on all nodes",
        "data": "copy the file again, or put it on shared storage",
    }
    for kind, fix in kinds.items():
        for name in sorted({key for facts in nodes for key in facts.get(kind, {})}):
            there = [facts.get(kind, {}).get(name) or "missing" for facts in nodes]
            found += _differ(name, there, fix)
    for kind, fix in (
        ("model", "copy the model again, or put it on shared storage"),
        ("driver", "install the same driver on all nodes"),
        ("gpu", "equal nodes are as fast as the slowest; leave the others out"),
        ("gpus", "set launch.processes to what every node has"),
    ):
        if any(kind in facts for facts in nodes):
            found += _differ(kind, [facts.get(kind) or "none" for facts in nodes], fix)
    if not found:
        found.append(Finding("good", "nodes", f"{len(nodes)} nodes agree on versions and files"))
    return found


def _differ(name: str, there: Sequence[Any], fix: str) -> list[Finding]:
    if len(set(map(str, there))) == 1:
        return []
    each = ", ".join(f"{_short(value)} on node {n}" for n, value in enumerate(there))
    return [Finding("bad", name, f"is not the same everywhere: {each}", fix)]


def _alone(place: str, facts: dict[str, Any]) -> list[Finding]:
    """What a node has, and of what it has little."""
    found = []
    for name, free in facts["disk"].items():
        if free < LITTLE_DISK:
            fact = f"{free / GIB:.1f} GiB are free where {name} is"
            found.append(Finding("warning", place, fact, "free some, or use another disk"))
    shared = facts["shared_memory"]
    if shared is not None and shared < LITTLE_SHM:
        fact = f"{SHARED} has {shared / GIB:.2g} GiB; NCCL shares memory between ranks there"
        found.append(Finding("warning", place, fact, "start the container with --shm-size=16g"))
    if facts["open_files"] < FEW_FILES:
        fact = f"a process may open {facts['open_files']} files"
        found.append(Finding("warning", place, fact, "raise it: `ulimit -n 65536`"))
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    gpus = f"{facts['gpus']} x {facts['gpu']}{driver}" if facts["gpus"] else "no GPU is visible"
    room = ", ".join(f"{free / GIB:,.0f} GiB for {name}" for name, free in facts["disk"].items())
    versions = facts["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if versions.get(name))
    fact = f"{gpus}; {facts['cores']} cores, {facts['memory'] / GIB:,.0f} GiB"
    found.append(Finding("good", place, f"{fact}; free disk: {room}; {names}"))
    return found


def _missing(place: str, facts: dict[str, Any], job: Job) -> list[Finding]:
    local = {source.label: source.path for source in (*job.data.train, *job.data.eval)}
    return [
        Finding("bad", place, f"{path} is not there", "copy it, or put it on shared storage")
        for label, path in local.items()
        if not facts["data"].get(label) and _is_local(path)
    ]


def _is_local(path: str) -> bool:
    return bool(Path(path).suffix) or path.startswith((".", "/", "~"))


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) > 40 else text


def _version(package: str) -> str:
    from importlib import metadata  # slow to import, and this module is behind `--help`

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    words = text.splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _open_files() -> int:
    if sys.platform == "win32":
        return FEW_FILES
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def _size(folder: str) -> int | None:
    return shutil.disk_usage(folder).total if Path(folder).is_dir() else None


def _free(path: Path) -> int:
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def _fingerprint(path: Path) -> str:
    """A hash of a file or a folder; of large files a sample. Empty if it isn't there."""
    if path.is_file():
        return _hash(path)
    if not path.is_dir():
        return ""
    files = sorted(each for each in path.rglob("*") if each.is_file())
    lines = [f"{file.relative_to(path)} {_hash(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for number in range(_SAMPLES):
                file.seek(number * (size - _WHOLE // _SAMPLES) // (_SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(_WHOLE // _SAMPLES))
    return digest.hexdigest()
