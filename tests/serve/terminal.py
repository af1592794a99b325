"""A command of ours in a pseudo-terminal, driven as by a person."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time


class Terminal:
    """A command in a pseudo-terminal, as a person has it before them."""

    def __init__(self, *arguments: str) -> None:
        self.fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardtune", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, text: str, seconds: float = 120) -> str:
        """What has come since, up to and with the text."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], left)[0]:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
        head, _, self.seen = self.seen.partition(text)
        return head + text

    def type(self, line: str) -> None:
        os.write(self.fd, (line + "\n").encode())

    def end(self) -> int:
        os.write(self.fd, b"\x04")
        code = self.process.wait(60)
        os.close(self.fd)
        return code
