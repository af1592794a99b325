"""What a node has, as plain facts, and what follows from the facts of all of them.

A finding is one sentence with its fix. Facts travel between nodes as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardtune.core.files.cache import cache_dir
from shardtune.core.host.machine import Machine
from shardtune.core.units import GIB

if TYPE_CHECKING:
    from shardtune.config.job import Job

PACKAGES = (
    "torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "bitsandbytes", "ray",
)  # fmt: skip
"""Besides those that strategies need."""
LITTLE_DISK, LITTLE_SHM, FEW_FILES = 10 * GIB, GIB, 4096
SHARED = "/dev/shm"  # noqa: S108 - a file system in memory, which NCCL uses
_SHOWN = ("Python", "torch", "transformers")
CLOCK_TOLERANCE = 1.0  # seconds that clocks may be apart
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


@dataclass(frozen=True)
class NodeFacts:
    """What one node has, and how it sees the job's files. Sizes are in bytes."""

    host: str
    versions: dict[str, str]
    """Of Python and of each package that is installed."""
    driver: str
    """Of NVIDIA; empty where there is none."""
    gpus: int
    gpu: str
    cores: int
    memory: int
    open_files: int
    """How many a process may open."""
    shared_memory: int | None
    """Size of /dev/shm, which NCCL uses; None where there is none."""
    disk: dict[str, int]
    """What is free where each folder is."""
    data: dict[str, str] = field(default_factory=dict)
    """A hash of each data set of the job; empty for one that isn't there."""
    model: str = ""
    """A hash of the model's folder; empty where the job names none."""

    def to_json(self) -> str:
        """As it travels between nodes."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> NodeFacts:
        return NodeFacts(**json.loads(text))


def local_facts(job: Job | None) -> NodeFacts:
    """This node, and how it sees the job's files."""
    machine = Machine.here()
    disk, data, model = {"cache": _free(cache_dir())}, {}, ""
    if job is not None:
        disk["save.directory"] = _free(Path(job.save.directory).expanduser())
        sources = (*job.data.train, *job.data.eval_sources)
        data = {source.label: _fingerprint(_place(source.path)) for source in sources}
        model = _fingerprint(Path(job.model.name).expanduser())
    wanted = (*PACKAGES, *_needed())
    installed = {name: found for name in wanted if (found := _version(name))}
    return NodeFacts(
        host=platform.node(),
        versions={
            "shardtune": _version("shardtune"),
            "Python": platform.python_version(),
            **installed,
        },
        driver=_driver(),
        gpus=machine.gpus,
        gpu=machine.gpu_name,
        cores=machine.cores,
        memory=machine.memory,
        open_files=_open_files(),
        shared_memory=_size(SHARED),
        disk=disk,
        data=data,
        model=model,
    )


def findings(nodes: Sequence[NodeFacts], job: Job | None) -> list[Finding]:
    """What is to be said about these nodes; the first is node 0."""
    found = [*_equal(nodes)]
    for number, facts in enumerate(nodes):
        found += _alone(f"node {number}" if len(nodes) > 1 else "here", facts)
        if job is not None:
            found += _missing(f"node {number}" if len(nodes) > 1 else "here", facts, job)
    return found


def _equal(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Versions, GPUs and files that have to be the same everywhere."""
    if len(nodes) == 1:
        return []
    found = []
    for name in sorted({name for facts in nodes for name in facts.versions}):
        there = [facts.versions.get(name) or "missing" for facts in nodes]
        found += _differ(name, there, "install the same version on all nodes")
    for name in sorted({name for facts in nodes for name in facts.data}):
        there = [facts.data.get(name) or "missing" for facts in nodes]
        found += _differ(name, there, "copy the file again, or put it on shared storage")
    for name, values, fix in (
        (
            "model",
            [facts.model for facts in nodes],
            "copy the model again, or put it on shared storage",
        ),
        ("driver", [facts.driver for facts in nodes], "install the same driver on all nodes"),
        (
            "gpu",
            [facts.gpu for facts in nodes],
            "equal nodes are as fast as the slowest; leave the others out",
        ),
        (
            "gpus",
            [facts.gpus for facts in nodes],
            "set launch.processes to what every node has",
        ),
    ):
        found += _differ(name, [str(value or "none") for value in values], fix)
    if not found:
        found.append(Finding("good", "nodes", f"{len(nodes)} nodes agree on versions and files"))
    return found


def _differ(name: str, there: Sequence[str], fix: str) -> list[Finding]:
    if len(set(there)) == 1:
        return []
    each = ", ".join(f"{_short(value)} on node {n}" for n, value in enumerate(there))
    return [Finding("bad", name, f"is not the same everywhere: {each}", fix)]


def _alone(place: str, facts: NodeFacts) -> list[Finding]:
    """What a node has, and of what it has little."""
    found = []
    for name, free in facts.disk.items():
        if free < LITTLE_DISK:
            fact = f"{free / GIB:.1f} GiB are free where {name} is"
            found.append(Finding("warning", place, fact, "free some, or use another disk"))
    shared = facts.shared_memory
    if shared is not None and shared < LITTLE_SHM:
        fact = f"{SHARED} has {shared / GIB:.2g} GiB; NCCL shares memory between ranks there"
        found.append(Finding("warning", place, fact, "start the container with --shm-size=16g"))
    if facts.open_files < FEW_FILES:
        fact = f"a process may open {facts.open_files} files"
        found.append(Finding("warning", place, fact, "raise it: `ulimit -n 65536`"))
    driver = f", driver {facts.driver}" if facts.driver else ""
    gpus = f"{facts.gpus} x {facts.gpu}{driver}" if facts.gpus else "no GPU is visible"
    room = ", ".join(f"{free / GIB:,.0f} GiB for {name}" for name, free in facts.disk.items())
    versions = facts.versions
    shown = (*_SHOWN, *_needed())
    names = ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))
    fact = f"{gpus}; {facts.cores} cores, {facts.memory / GIB:,.0f} GiB"
    found.append(Finding("good", place, f"{fact}; free disk: {room}; {names}"))
    return found


def _missing(place: str, facts: NodeFacts, job: Job) -> list[Finding]:
    local = {source.label: source.path for source in (*job.data.train, *job.data.eval_sources)}
    return [
        Finding("bad", place, f"{path} is not there", "copy it, or put it on shared storage")
        for label, path in local.items()
        if not facts.data.get(label) and _is_local(path)
    ]


def _is_local(path: str) -> bool:
    return bool(Path(path).suffix) or path.startswith((".", "/", "~"))


def _short(text: str) -> str:
    return text[:12] if len(text) > 40 else text


def _needed() -> list[str]:
    """Packages of strategies. Their sections are pydantic's, which `--help` has no time for."""
    from shardtune.parallel import packages_needed

    return packages_needed()


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


def _place(path: str) -> Path:
    """The file or folder of a data set; of a pattern the folder that it looks through."""
    before, star, _ = path.partition("*")
    return Path(before.rpartition("/")[0] or "." if star else path).expanduser()


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
