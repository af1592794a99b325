"""Rows as they are read: good ones with their number, bad ones with the reason."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

NOT_UTF8 = "not UTF-8 text"
"""How the reason begins why a row in another encoding can't be read."""
TO_UTF8 = "iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW, where it is Western European"
CONTROL_IN_TEXT = "its text holds the control token"
"""How the reason begins where a row may not hold one."""
MAX_JSON_DEPTH = 100  # levels of nesting; no format here needs more than five

# A high surrogate without a low one after it, or a low one without a high one before it.
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One row: its line or row number (counted from 1), and its columns."""

    number: int
    value: dict[str, Any]
    size: int = 0
    """About how many bytes it takes, so that a batch can be kept small; 0 where not known."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be used, and why."""

    number: int
    reason: str
    column: int | None = None
    """The character of the line where it goes wrong, counted from 1, where there is one."""
    missing: str = ""
    """The column that it lacks, if that is the reason."""
    culprit: Literal["", "template"] = ""
    """What is at fault where the row itself isn't."""


class Unreadable(Exception):
    """Why a row can't be read, and at which character."""

    culprit: Literal["", "template"] = ""

    def __init__(self, reason: str, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


class JsonReader:
    """Reads JSON objects, and refuses what Python's reader lets through in silence."""

    def __init__(self) -> None:
        self.duplicate = ""  # a key that stood twice in an object of the last value
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def decode(self, text: str, position: int) -> tuple[Any, int]:
        """The value at `position`, or behind the blanks there, and where it ends."""
        self.duplicate = ""
        return self._decoder.raw_decode(text, skip_blanks(text, position))

    def read_object(self, text: str) -> dict[str, Any]:
        """The object that is the whole of `text`."""
        try:
            value, end = self.decode(text, 0)
            end = skip_blanks(text, end)
            if text[end:] == ",":
                raise json.JSONDecodeError("a comma follows the object", text, end)
            if end < len(text):
                raise json.JSONDecodeError("something follows the end of the value", text, end)
        except json.JSONDecodeError as error:
            if text.lstrip().startswith("{'"):
                raise Unreadable("a Python dict, not JSON: json.dumps writes it as JSON") from None
            raise Unreadable(f"broken JSON: {error.msg}", error.pos + 1) from None
        except RecursionError:
            raise Unreadable(f"nested more than {MAX_JSON_DEPTH} levels deep") from None
        except ValueError as error:  # a number of more digits than Python will read
            raise Unreadable(f"broken JSON: {error}") from None
        return self._checked(value, text)

    def row(self, number: int, value: Any, text: str) -> SourceRecord | BadRow:
        """The row of a list that was just decoded from `text`."""
        try:
            return SourceRecord(number, self._checked(value, text), len(text))
        except Unreadable as error:
            # Its column would be one of the cut-out text; the row's number is what helps here.
            return BadRow(number, error.reason)

    def _checked(self, value: Any, text: str) -> dict[str, Any]:
        """`value`, which was just decoded from `text`, if it is a sound object; a row that is a
        list of turns by itself (as nanochat has it) becomes the column of turns."""
        if _is_turns(value):
            value = {"messages": value}
        if not isinstance(value, dict):
            raise Unreadable(f"{_kind(value)}, not a JSON object with columns")
        if self.duplicate:
            raise Unreadable(f"the key {self.duplicate!r} is written twice")
        # Counting brackets is much faster than walking, and clears nearly all rows.
        if text.count("{") + text.count("[") > MAX_JSON_DEPTH and _too_deep(value):
            raise Unreadable(f"nested more than {MAX_JSON_DEPTH} levels deep")
        if not text.isascii() and not encodable(text):
            raise Unreadable(NOT_UTF8)
        if ("\\ud" in text or "\\uD" in text) and (found := _LONE_SURROGATE.search(text)):
            self._require_text(value, found)
        return value

    def _require_text(self, value: Any, found: re.Match[str]) -> None:
        """Raises if the value can't be written as UTF-8 (`found` may have been a false alarm)."""
        if not encodable(json.dumps(value, ensure_ascii=False)):
            reason = f"half a surrogate pair ({found.group()}), which no text can hold"
            raise Unreadable(reason, found.start() + 1)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            keys = [key for key, _ in pairs]
            self.duplicate = next(key for key in keys if keys.count(key) > 1)
        return value


def decoded(raw: bytes) -> str:
    """The line as text; raises Unreadable if it isn't any."""
    if b"\0" in raw:
        before = raw[: raw.index(b"\0")]
        raise Unreadable("a NUL byte", len(before.decode("utf-8", "replace")) + 1)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(raw[: error.start].decode("utf-8")) + 1
        reason = f"{NOT_UTF8} (byte 0x{raw[error.start]:02x})"
        raise Unreadable(reason, column) from None


def _is_turns(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)
    )


def encodable(text: str) -> bool:
    """Whether the text can be written as UTF-8: one with half a surrogate pair in it can't."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


_BLANKS = re.compile(r"[ \t\r\n]*")


def skip_blanks(text: str, position: int) -> int:
    """The first place from `position` on that isn't blank."""
    found = _BLANKS.match(text, position)
    return found.end() if found else position


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list"}
    return names[type(value)]
