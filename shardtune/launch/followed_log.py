"""A log file that is shown while another process writes it (`tail -f`)."""

from __future__ import annotations

import codecs
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

_PIECE = 1 << 16  # bytes


class FollowedLog:
    """What a file gets from now on; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self, stream: TextIO) -> None:
        """Copies what was added since the last time."""
        with suppress(OSError):  # the run doesn't depend on what is shown of it
            if self._file is None:
                self._file = self._path.open("rb")
            while piece := self._file.read(_PIECE):
                stream.write(self._decoder.decode(piece))
            stream.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
