"""Words for whoever watches a command; what it answers goes to standard output."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """On standard error, at once."""
    print(text, file=sys.stderr, flush=True)
