"""Searches texts for a pattern that may never come to an end: in a child process, with a limit.

Python's `re` tries all ways in which a pattern like `(a+)+b` may fit, which doubles with every
letter, and holds the interpreter meanwhile: no thread could stop it. A child process sets itself a
timer before each text, and is ended by the system where that runs out; another goes on behind it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from shardtune.errors import JobError, Problem

_SEARCH = """\
import json, re, signal, sys

# Whatever was inherited: it comes, and ends the process.
signal.signal(signal.SIGPROF, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
given = json.load(sys.stdin)
pattern = re.compile(given["pattern"], given["flags"])
for text in given["texts"]:
    signal.setitimer(signal.ITIMER_PROF, given["seconds"])
    found = [each[0] if not pattern.groups else each[1] for each in pattern.finditer(text)]
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps([len(found), *found[:1], *found[-1:]]), flush=True)
"""


class Found(NamedTuple):
    """What a pattern has found in a text: its first group, or all of it where it has none."""

    places: int
    first: str = ""
    last: str = ""


def search_each(
    pattern: str, flags: int, texts: Sequence[str], *, seconds: float
) -> list[Found | None]:
    """All places of `pattern` in each text; None where the search takes more than `seconds` of
    processor time."""
    results: list[Found | None] = []
    while len(results) < len(texts):
        given = {"pattern": pattern, "flags": flags, "seconds": seconds}
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=json.dumps(given | {"texts": texts[len(results) :]}),
            capture_output=True,
            text=True,
            check=False,
        )
        for line in child.stdout.splitlines():
            count, *ends = json.loads(line)
            results.append(Found(count, *(each or "" for each in ends)))
        if child.returncode == -signal.SIGPROF:
            results.append(None)
        elif child.returncode:
            said = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            fact = f"the search for {pattern!r} failed: {said}"
            raise JobError(Problem("evaluate.metric", fact, "simplify the pattern"))
    return results
