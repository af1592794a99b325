"""What a console of 80 columns shows, as text."""

from __future__ import annotations

import io

from rich.console import Console

WIDTH = 80


def plain_console() -> Console:
    """A log: no terminal, no colours."""
    return Console(file=io.StringIO(), width=WIDTH, force_terminal=False, color_system=None)


def shown(console: Console) -> str:
    """Everything that was printed; fails if a line is wider than the screen."""
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(len(line) <= WIDTH for line in text.splitlines())
    return text


def squeezed(text: str) -> str:
    """Runs of blanks as one: where a table puts its columns is its own business."""
    return "\n".join(" ".join(line.split()) for line in text.splitlines())
