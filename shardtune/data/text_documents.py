"""Plain text files: where one document ends and the next one starts.

A text file doesn't say what a document is. The job can (`documents:`); else the beginning of the
file is looked at, and what was chosen is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.config.job import Separator
from shardtune.data.open_file import BOM, open_file
from shardtune.data.records import BadRow, SourceRecord, Unreadable, decoded

if TYPE_CHECKING:
    from shardtune.config.job import Source

END_OF_TEXT = "<|endoftext|>"  # what corpora put between documents that were once joined
BLANK_SHARE = 50  # one line in so many is blank where blank lines separate, not just happen

LINE = re.compile(rb"\n")
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n(?:[ \t\r]*\n)*")
NOWHERE = re.compile(rb"(?!)")


@dataclass(frozen=True)
class DocumentRule:
    """How a text file is cut into documents."""

    border: re.Pattern[bytes]
    unit: str
    """What a document is, in words."""
    note: str = ""
    """What to tell about it, where it was chosen and not asked for."""

    @property
    def by_line(self) -> bool:
        return self.border is LINE


_RULES = {
    "file": DocumentRule(NOWHERE, "the whole file"),
    "blank_line": DocumentRule(BLANK_LINE, "what stands between blank lines"),
    "line": DocumentRule(LINE, "a line"),
}


def document_rule(source: Source, head: bytes) -> DocumentRule:
    """The rule that a job asks for, or the one that fits the beginning of the file."""
    asked = source.documents
    if isinstance(asked, Separator):
        return _between(asked.separator)
    if asked != "auto":
        return _RULES[asked]
    lines = head.strip().splitlines()
    blank = sum(not line.strip() for line in lines)
    if END_OF_TEXT.encode() in head:
        rule = _between(END_OF_TEXT)
        return _chosen(rule, f'{{separator: "{END_OF_TEXT}"}}', "that stands in the file")
    if blank and blank * BLANK_SHARE >= len(lines):
        share = f"{blank / len(lines):.0%} of its lines are blank"
        return _chosen(_RULES["blank_line"], "blank_line", share)
    return _chosen(_RULES["line"], "line", f"{blank} of its first {len(lines):,} lines are blank")


def _chosen(rule: DocumentRule, key: str, reason: str) -> DocumentRule:
    others = [f"documents: {name}" for name in _RULES if name != key]
    note = f"a document is {rule.unit} (documents: {key}, because {reason}); "
    note += f"otherwise set {', '.join(others)} or a separator"
    return DocumentRule(rule.border, rule.unit, note)


def _between(separator: str) -> DocumentRule:
    # A file with Windows' line ends has the same separators.
    pattern = re.escape(separator.encode()).replace(b"\\\n", rb"\r?\n")
    return DocumentRule(re.compile(pattern), f"what stands between {separator!r}")


@dataclass(frozen=True)
class TextStretch:
    """Documents of a text file: those in bytes [start, stop), the first of which starts in line
    `first`. It is held in memory as a whole."""

    path: Path
    border: re.Pattern[bytes]
    start: int
    stop: int
    first: int
    count: int | None = None

    def rows(self) -> Iterator[SourceRecord | BadRow]:
        with open_file(self.path) as file:
            if self.start:
                file.seek(self.start)
            raw = file.read(self.stop - self.start)
        number, place = self.first, 0
        for end, after in self._cuts(raw):
            document = raw[place:end]
            inner = document.strip(b"\r\n").removeprefix(BOM)
            if inner.strip():
                before = len(document) - len(document.lstrip(b"\r\n"))
                yield _document(number + document[:before].count(b"\n"), inner)
            number += raw.count(b"\n", place, after)
            place = after

    def _cuts(self, raw: bytes) -> Iterator[tuple[int, int]]:
        """Where each document ends, and where the next one starts."""
        for border in self.border.finditer(raw):
            yield border.start(), border.end()
        yield len(raw), len(raw)


def _document(number: int, raw: bytes) -> SourceRecord | BadRow:
    try:
        text = decoded(raw)
    except Unreadable as error:
        before = raw.decode("utf-8", "replace")[: (error.column or 1) - 1]
        column = len(before) - before.rfind("\n")
        return BadRow(number + before.count("\n"), error.reason, column)
    return SourceRecord(number, {"text": text.replace("\r\n", "\n")}, len(raw))
