"""Function calls in what a model writes: JSON, in the spelling of the model's own chat template.

How a model spells a call is asked of its template, by a dialogue with one: the model was trained on
what that writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Call:
    """A function's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CallSpelling:
    """What stands around the JSON of a call."""

    parser: str
    """What vLLM calls it (`--tool-call-parser`)."""
    opening: str
    closing: str = ""
    """Empty where a call ends with its JSON."""
    bare: bool = False
    """Whether calls are the whole answer; `opening` may be missing then."""

    @property
    def tags(self) -> tuple[str, ...]:
        """What has to be seen in an answer's text."""
        return () if self.bare else (self.opening, self.closing)


SPELLINGS = (
    CallSpelling("hermes", "<tool_call>", "</tool_call>"),  # Qwen2.5 and 3, SmolLM3 as well
    CallSpelling("mistral", "[TOOL_CALLS]"),
    CallSpelling("llama3_json", "<|python_tag|>", bare=True),
)

RenderTools = Callable[[Sequence[Mapping[str, object]], Sequence[object], bool], str]
"""The text of a dialogue with tools; with True the generation prompt follows."""

_NAME = "PROBE"
_NOTHING: Mapping[str, object] = {"type": "object", "properties": {}}
_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {"name": _NAME, "description": "a call", "parameters": _NOTHING},
}
_QUESTION: Mapping[str, object] = {"role": "user", "content": "QUESTION"}
_CALLING: Mapping[str, object] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        # Nine letters and digits, as Mistral's templates want it.
        {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": {}}}
    ],
}


def template_spelling(render: RenderTools) -> CallSpelling | None:
    """How a chat template has calls written; None where it says nothing of them, or another way."""
    try:
        asked = render([_QUESTION], [_TOOL], True)
        whole = render([_QUESTION, _CALLING], [_TOOL], False)
    except Exception:  # noqa: BLE001  a template is somebody else's program; many know no tools
        return None
    written = (each for each in SPELLINGS if _is_written(each, asked, whole))
    # A template may leave calls out (SmolLM3's does), and yet tell the model how to write them.
    told = (each for each in SPELLINGS if _is_told(each, asked))
    return next(written, None) or next(told, None)


def _is_written(spelling: CallSpelling, asked: str, whole: str) -> bool:
    before, tag, behind = whole.rpartition(spelling.opening)
    if spelling.bare and not (tag and before == asked):
        behind = whole[len(asked) :] if whole.startswith(asked) else ""
    elif not tag:
        return False
    if spelling.bare and not behind.lstrip().startswith("{"):
        return False  # a list of calls is another spelling (xLAM's)
    found = first_calls(behind)
    if found is None or [call.name for call in found[0]] != [_NAME]:
        return False
    return behind[found[1] :].lstrip().startswith(spelling.closing)


def _is_told(spelling: CallSpelling, asked: str) -> bool:
    opening = re.escape(spelling.opening)
    return not spelling.bare and bool(re.search(opening + r'\s*\[?\{"name"', asked))


def json_calls(text: str) -> list[Call]:
    """The calls of a JSON text: an object with name and arguments, or a list of such. Empty where
    it is anything else."""
    found = first_calls(text)
    return found[0] if found and not text[found[1] :].strip() else []


def first_calls(
    text: str, start: int = 0, *, must_have_arguments: bool = False
) -> tuple[list[Call], int] | None:
    """The calls of the JSON text that begins there, none if it is another one, and where it ends.
    None where it doesn't end, or is no JSON."""
    try:
        found, end = _JSON.raw_decode(text, behind_blanks(text, start))
    except (ValueError, RecursionError):  # a model that repeats "[" nests too deep
        return None
    entries = found if isinstance(found, list) else [found]
    calls = [_call(entry, must_have_arguments) for entry in entries]
    known = [call for call in calls if call is not None]
    return known if len(known) == len(calls) else [], end


def behind_blanks(text: str, place: int) -> int:
    """Past what may stand between calls."""
    while place < len(text) and text[place] in " \t\r\n;":
        place += 1
    return place


def _call(entry: Any, must_have_arguments: bool) -> Call | None:
    entry = entry.get("function", entry) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters", None if must_have_arguments else {}))
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict) or not _can_be_sent([entry["name"], arguments]):
        return None
    return Call(entry["name"], arguments)


def _can_be_sent(found: Any) -> bool:
    """Whether every client can read it: half of a surrogate pair or an infinite number is no JSON,
    and an escape or an exponent too large makes them in text that is."""
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)
