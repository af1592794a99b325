"""The marker of a run directory: a sealed file by which a folder is known to be ours.

It is the first file that is written and says which run this is and which names in the folder belong
to it. Nothing else there is ever replaced, swept away or deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardtune.checkpoint.commit_by_rename import is_unnamed, own_checkpoints
from shardtune.checkpoint.manifest import Damaged, seal, unseal
from shardtune.checkpoint.run_logs import RunLogs
from shardtune.config.job_file import load_job
from shardtune.core.files.atomic_write import atomic_write
from shardtune.core.files.regular_file import read_regular
from shardtune.errors import Problem, RunError, ShardtuneError

MARKER_FILE = "run.json"
MARKER_FORMAT = 1
RUN_FILES = (
    "job.yaml",
    "forecast.json",
    "environment.json",
    "metrics.jsonl",
    "trace.jsonl",
    "answers.json",
    "data.json",
    "report.json",
    "report.html",
)
RUN_FOLDERS = ("checkpoints", "result", "logs", "track", "profile")
PROFILED = re.compile(r"rank-\d+\.(json|trace\.json\.gz|memory\.pickle)|\.rank-\d+\.json\.partial")
"""The files of a profile."""
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[\w-][\w.-]*")  # of a file in the folder itself, and none that is hidden
_LARGEST = 1 << 24


@dataclass(frozen=True)
class RunMarker:
    """What the marker says."""

    run: str
    """Drawn for each run: whose the checkpoints are."""
    names: tuple[str, ...] = (*RUN_FILES, *RUN_FOLDERS)
    begun: bool = False
    """Whether the run's job is written down. Until then there is nothing to go on with."""
    saved: bool = False
    """Whether the run has had a checkpoint. If none is found then, they are out of sight."""
    data: Mapping[str, str] = field(default_factory=dict)
    """The digest of each data set."""


def write_marker(folder: Path, marker: RunMarker) -> None:
    body = {"format": MARKER_FORMAT, "kind": "run", **asdict(marker)}
    atomic_write(folder / MARKER_FILE, seal(body))


def read_marker(folder: Path) -> RunMarker | None:
    """The marker in `folder`; None if there is none that is as it was written."""
    try:
        body = unseal(folder / MARKER_FILE)
    except Damaged:
        return None
    if body.get("kind") != "run":
        return None
    if body.get("format", 0) > MARKER_FORMAT:
        fact = f"is written in format {body['format']}; this version reads {MARKER_FORMAT}"
        fix = "use the version of shardtune that wrote it"
        raise RunError(Problem(str(folder / MARKER_FILE), fact, fix))
    try:
        return RunMarker(
            run=str(body["run"]),
            names=tuple(name for name in body["names"] if _NAME.fullmatch(name)),
            begun=bool(body["begun"]),
            saved=bool(body["saved"]),
            data={str(name): str(digest) for name, digest in body["data"].items()},
        )
    except (KeyError, TypeError, AttributeError):
        return None


def recognise_run(folder: Path) -> RunMarker | None:
    """The marker that a run of an earlier version would have, or one that has lost its own.

    It is known by the job and by an environment.json that only a run writes. That it had
    checkpoints is known by those that are there, by its report, or by the steps in its metrics.
    """
    found = read_object(folder / "environment.json")
    run, data = str(found.get("run")), found.get("data", {})
    ours = _RUN_ID.fullmatch(run) and {"shardtune", "python", "platform"} <= found.keys()
    if not ours or not isinstance(data, dict) or not (folder / "job.yaml").is_file():
        return None
    saved = bool(own_checkpoints(folder / "checkpoints", run))
    saved = saved or (folder / "report.json").exists() or (folder / "result").exists()
    saved = saved or _is_past_a_save(folder)
    digests = {str(name): str(digest) for name, digest in data.items()}
    names = tuple(name for name in RunMarker.names if name not in _persons(folder))
    return RunMarker(run, names, begun=True, saved=saved, data=digests)


def _persons(folder: Path) -> set[str]:
    """What lies under a name that runs took only later than this one, which left no data.json."""
    if (folder / "data.json").is_file():
        return set()
    return {name for name in ("report.html", "track", "profile") if (folder / name).exists()}


def _is_past_a_save(folder: Path) -> bool:
    """Whether the metrics go on after a step whose checkpoint was due. One that was still being
    written when the run was killed has left something, and is none."""
    try:
        every = load_job(folder / "job.yaml").job.save.every
    except ShardtuneError:
        return False
    metrics = RunLogs(folder / "metrics.jsonl", folder / "trace.jsonl", writes=False)
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir() and any(map(is_unnamed, checkpoints.iterdir())):
        return False
    return 0 < every < metrics.last_step()


def read_object(path: Path) -> dict[str, Any]:
    """A small JSON object; an empty one where there is none that can be read."""
    try:
        found = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_small(path: Path) -> str:
    """The text of one of the small files; OSError if it is none."""
    return read_regular(path, _LARGEST).decode("utf-8")
