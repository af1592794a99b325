"""Text from tokens as they come: incremental detokenization with stop strings.

A token alone is not always text: a letter may take several, and many tokenizers write a space by
what stands before. So a few tokens are decoded with each new one (at first the prompt's last ones),
and text is given out when it is whole. What might be the beginning of a stop string is held back
until it is clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtune.core.model.decoding_context import decoding_context

_HALF = "\ufffd"  # what an incomplete letter decodes to
_LONGEST_LETTER = 8
"""Tokens after which a half letter is no letter in the making: it is given out as it is."""


class TextStream:
    """The text of one answer. `add` returns what can be shown; `stopped` says that it has ended."""

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        tags: Sequence[str] = (),
    ) -> None:
        """`tags` are texts that are shown even where each is a special token."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tags = _special(tokenizer, tags)
        self._ids = decoding_context(tokenizer, prompt)
        self._shown_from = 0  # ids from here give the context of the next text
        self._shown_to = len(self._ids)  # ids up to here are in a text that was given out
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that this token completes, without what a stop string may still take back."""
        if token in self._tags:
            text = self._pending() + self._tags[token]
            # Text behind it is one of its own: its tokens would be no context when skipped.
            self._ids, self._shown_from, self._shown_to = [], 0, 0
            return self._let_out(text)
        self._ids.append(token)
        before = self._decode(self._shown_from, self._shown_to)
        now = self._decode(self._shown_from, len(self._ids))
        waiting = len(self._ids) - self._shown_to < _LONGEST_LETTER
        if len(now) <= len(before) or (now.endswith(_HALF) and waiting):
            return ""
        self._shown_from, self._shown_to = self._shown_to, len(self._ids)
        return self._let_out(now[len(before) :])

    def end(self) -> str:
        """What is left when no more tokens come."""
        if self.stopped:
            return ""
        text = self._let_out(self._pending())
        text, self._held = text + ("" if self.stopped else self._held), ""
        return text

    def _pending(self) -> str:
        """Of the tokens so far, what was not whole."""
        before = self._decode(self._shown_from, self._shown_to)
        return self._decode(self._shown_from, len(self._ids))[len(before) :]

    def _let_out(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, start: int, end: int) -> str:
        return str(
            self._tokenizer.decode(
                self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def _special(tokenizer: Any, tags: Sequence[str]) -> dict[int, str]:
    """Those of the texts that are special tokens, which decoding leaves out."""
    found = {tag: tokenizer.convert_tokens_to_ids(tag) for tag in tags if tag}
    return {
        token: tag
        for tag, token in found.items()
        # A text that is no token is the unknown one to some tokenizers.
        if token is not None and tokenizer.convert_ids_to_tokens(token) == tag
        if not tokenizer.decode([token], skip_special_tokens=True)
    }


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
