"""What a tracker has been sent of a run: a small file in the run directory.

By it a resumed run goes on in the same run of the tracker, and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from shardtune.core.files.atomic_write import atomic_write
from shardtune.core.files.regular_file import read_regular
from shardtune.core.record import Record

TRACK_FOLDER = "track"
"""Of the run directory: `LABEL.json` (this file), `LABEL.log`, and `LABEL/`, the sink's own."""
_LARGEST = 1 << 20


class TrackerState(Record):
    """One tracker of one run."""

    run: str
    """Of which run this is: another one in the same directory begins anew."""
    id: str
    """`Sink.id`."""
    sent: Mapping[str, int] = Field(default_factory=dict)
    """The last step that was sent, by kind of line: `step`, `evaluation/NAME`, `report`."""

    def has(self, kind: str, step: int) -> bool:
        """Whether such a line of this step was sent."""
        return self.sent.get(kind, -1) >= step


def state_file(run_dir: Path, label: str) -> Path:
    return run_dir / TRACK_FOLDER / f"{label}.json"


def read_tracker_state(run_dir: Path, label: str, run: str) -> TrackerState | None:
    """What the tracker has; None for nothing of this run."""
    try:
        text = read_regular(state_file(run_dir, label), _LARGEST)
        found = TrackerState.model_validate_json(text)
    except (OSError, ValidationError):
        return None
    return found if found.run == run else None


def write_tracker_state(
    run_dir: Path, label: str, state: TrackerState, *, durable: bool = False
) -> None:
    """Durable is what survives a power cut. To wait for the disk after each flush could delay a
    checkpoint, and if the last one is lost only some points are sent again."""
    path = state_file(run_dir, label)
    text = state.model_dump_json(indent=2) + "\n"
    if durable:
        atomic_write(path, text)
    else:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
