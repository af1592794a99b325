"""An answer as it comes, taken apart into text and the functions that it calls.

Text is held back while it may be the beginning of a call. A call is given out whole; what looks
like one and can't be read stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace

from shardtune.core.model.written_calls import (
    Call,
    CallSpelling,
    behind_blanks,
    first_calls,
    json_calls,
)
from shardtune.serve.generation_request import Piece, ToolCall
from shardtune.serve.text_stream import overlap

Part = str | ToolCall


class CallStream:
    """The calls of one answer, by the spelling of its model."""

    def __init__(self, spelling: CallSpelling) -> None:
        self._spelling = spelling
        self._held = ""
        self._said = False
        """Whether a bare answer has shown to be text."""
        self._called = 0

    def pieces(self, piece: Piece) -> list[Piece]:
        """A piece of the answer as those that are told. The last one has its tokens and its end."""
        parts = self._take(piece.text, final=piece.finish is not None)
        pieces = [
            Piece("", calls=(part,)) if isinstance(part, ToolCall) else Piece(part)
            for part in parts
        ] or [Piece("")]
        finish = "tool_calls" if piece.finish == "stop" and self._called else piece.finish
        pieces[-1] = replace(pieces[-1], tokens=piece.tokens, finish=finish)
        return pieces

    def _take(self, text: str, *, final: bool) -> list[Part]:
        self._held += text
        return self._bare(final) if self._spelling.bare else self._tagged(final)

    def _bare(self, final: bool) -> list[Part]:
        """The whole answer is calls, or none of it is."""
        if not self._said:
            body = self._held.lstrip()
            tag_may_come = self._spelling.opening.startswith(body)
            calls, rest = _calls_in_a_row(body.removeprefix(self._spelling.opening))
            if final and calls and not rest:
                return self._give_calls(calls, "")
            if not final and (tag_may_come or (rest is not None and rest[:1] in ("", "{"))):
                return []
        self._said = True
        return self._give_text(len(self._held))

    def _tagged(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        opening, closing = self._spelling.opening, self._spelling.closing
        while (place := self._held.find(opening)) >= 0:
            parts += self._give_text(len(self._held[:place].rstrip()))
            start = self._held.index(opening) + len(opening)
            calls, end = _closed_calls(self._held, start, closing, final)
            if end is None:
                return parts
            parts += self._give_calls(calls, self._held[end:]) if calls else self._give_text(end)
        if final and not self._called:
            return parts + self._give_text(len(self._held))
        keep = 0 if final else overlap(self._held, opening)
        return parts + self._give_text(len(self._held[: len(self._held) - keep].rstrip()))

    def _give_text(self, end: int) -> list[Part]:
        text, self._held = self._held[:end], self._held[end:]
        return [text] if text else []

    def _give_calls(self, calls: Sequence[Call], rest: str) -> list[Part]:
        self._held = rest
        first, self._called = self._called, self._called + len(calls)
        return [_tool_call(index, call) for index, call in enumerate(calls, first)]


def _tool_call(index: int, call: Call) -> ToolCall:
    # Mistral's templates refuse an id that isn't nine letters and digits, in the next request.
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return ToolCall(index, uuid.uuid4().hex[:9], call.name, arguments)


def _closed_calls(
    text: str, start: int, closing: str, final: bool
) -> tuple[list[Call], int | None]:
    """The calls behind an opening tag, and where they end; nowhere as long as more may come."""
    if closing:
        end = text.find(closing, start)
        if end >= 0:
            return json_calls(text[start:end]), end + len(closing)
        return (json_calls(text[start:]), len(text)) if final else ([], None)
    found = first_calls(text, start)
    return found or ([], len(text) if final else None)


def _calls_in_a_row(text: str) -> tuple[list[Call], str | None]:
    """The calls that a text begins with, and the rest of it; None where one is no call."""
    calls: list[Call] = []
    place = behind_blanks(text, 0)
    while text[place : place + 1] == "{":
        found = first_calls(text, place, must_have_arguments=True)
        if found is None:
            break
        if not found[0]:
            return [], None
        calls += found[0]
        place = behind_blanks(text, found[1])
    return calls, text[place:]
