"""Whether a folder is the same one on all nodes: node 0 leaves a mark in it, the others look."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_MARK = ".shardtune-nodes"


@dataclass(frozen=True)
class SharedFolder:
    """A folder on storage that every node has to see at the same path."""

    path: Path

    def mark(self, text: str) -> None:
        (self.path / _MARK).write_text(text, encoding="utf-8")

    def unmark(self) -> None:
        (self.path / _MARK).unlink(missing_ok=True)

    def has_mark(self, text: str, *, within: float) -> bool:
        """Whether the mark is there; a network file system may show it a few seconds later."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            try:
                if (self.path / _MARK).read_text(encoding="utf-8") == text:
                    return True
            except OSError:
                pass
            time.sleep(0.1)
        return False
