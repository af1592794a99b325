"""Text to tokens, with the trained part of the text carried over to them.

A whole text is tokenized in one go, never piece by piece, because pieces would be merged otherwise
at their edges. A token is trained if any character of it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Spans = Sequence[tuple[int, int]]

CALL = 1 << 20  # characters in one call: the library needs about 150 bytes for each
TEXT_WINDOW = 1 << 18  # a longer text is tokenized through windows of this size ...
OVERLAP = 1 << 12  # ... which overlap, so that they can be joined where both agree
AGREE = 256  # characters over which they have to


_TRUE = np.ones(1, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Text:
    """A text, and the stretches of its characters that are trained, in order."""

    text: str
    spans: Spans | None
    """None for all of it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A document: token ids, and which of them are trained."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    content: int = 0
    """A hash of what the row says that it was made of."""


class ControlReading(Protocol):
    """How control tokens in a text are read (`data/control_tokens.py`)."""

    def engine(self, tokenizer: Any) -> Any: ...

    def shown(self, text: str) -> str: ...

    def renames(self, engine: Any) -> dict[int, int]: ...


class Encoder:
    """A fast tokenizer's own engine, which can take many texts at once and keeps the offsets."""

    def __init__(self, tokenizer: Any, control: ControlReading | None = None) -> None:
        """`control` says how control tokens in the texts are read; as such, without it."""
        self._control = control
        self._engine = control.engine(tokenizer) if control else tokenizer.backend_tokenizer
        self._renames = control.renames(self._engine) if control else {}
        # What a tokenizer.json asks for here would cut or fill documents behind our back. The
        # tokenizer sets both anew at every call of its own.
        self._engine.no_truncation()
        self._engine.no_padding()

    def encode(
        self, texts: Sequence[Text], *, special: bool, end: int | None = None
    ) -> list[Tokens]:
        """Tokens of each text.

        `special` adds what the tokenizer puts around a plain text, and `end` is a token to train at
        the end of each; neither is put where the text brings it along.
        """
        encoded: list[Tokens] = []
        if self._control:
            texts = [replace(text, text=self._control.shown(text.text)) for text in texts]
        for group in _grouped(texts):
            if len(group) == 1 and len(group[0].text) > TEXT_WINDOW:
                long = self._encode_long(group[0], special)
                encoded.append(_ended(self._once(long) if special else long, end))
                continue
            masked = any(text.spans is not None for text in group)
            # The fast one keeps no offsets.
            many = self._engine.encode_batch if masked else self._engine.encode_batch_fast
            plain = [text.text for text in group]
            for text, found in zip(group, many(plain, add_special_tokens=special), strict=True):
                tokens = Tokens(self._ids(found.ids), _trained(found, text))
                encoded.append(_ended(self._once(tokens) if special else tokens, end))
        return encoded

    def _once(self, tokens: Tokens) -> Tokens:
        """The document without what the tokenizer put around a text that brought it along: one that
        somebody has put through a chat template begins with `<s>` already."""
        before, after = self._added
        first, last = len(before), len(tokens.ids) - len(after)
        if before and tokens.ids[first : 2 * first].tolist() == before:
            tokens = Tokens(tokens.ids[first:], tokens.trained[first:])
            last -= first
        if after and tokens.ids[last - len(after) : last].tolist() == after:
            tokens = Tokens(tokens.ids[:last], tokens.trained[:last])
        return tokens

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        return self._around("x")

    def _ids(self, found: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        ids = np.array(found, dtype=np.int32)
        if not self._renames or not len(ids) or ids.max() < min(self._renames):
            return ids
        renamed: NDArray[np.int32] = ids.copy()
        for stand_in, own in self._renames.items():
            renamed[ids == stand_in] = own
        return renamed

    def _encode_long(self, text: Text, special: bool) -> Tokens:
        """The same for a text of megabytes, in bounded memory: where a token stands is known for
        two windows at a time."""
        before, after = self._added if special else ([], [])
        first, last = [_Window.at(before, 0)], [_Window.at(after, len(text.text))]
        parts: list[Tokens] = []
        place: int | None = None
        for window in chain(first, self._windows(text.text), last):
            if window is None:  # no two of them agree, as in a single word of megabytes
                found = self._engine.encode(text.text, add_special_tokens=special)
                return Tokens(self._ids(found.ids), _trained(found, text))
            trained = _overlapping(window.starts, window.ends, text.spans, place)
            parts.append(Tokens(window.ids, trained))
            place = int(window.ends[-1]) if len(window.ends) else place
        ids = self._ids(np.concatenate([part.ids for part in parts]))
        return Tokens(ids, np.concatenate([part.trained for part in parts]))

    def _windows(self, text: str) -> Iterator[_Window | None]:
        """Stretches of a text that join, one after the other; None where they can't be joined."""
        firsts = range(0, max(1, len(text) - OVERLAP), TEXT_WINDOW - OVERLAP)
        last: _Window | None = None
        for group in range(0, len(firsts), CALL // TEXT_WINDOW):
            some = firsts[group : group + CALL // TEXT_WINDOW]
            found = self._engine.encode_batch(
                [text[first : first + TEXT_WINDOW] for first in some], add_special_tokens=False
            )
            for first, encoding in zip(some, found, strict=True):
                window = _Window.of(encoding, first)
                if last is not None:
                    cut = _joint(last, window)
                    if cut is None:
                        yield None
                        return
                    yield last.before(cut)
                    window = window.since(cut)
                last = window
        yield last

    def _around(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        found = self._engine.encode(text[:16], add_special_tokens=True)
        inner = [place for place, mask in enumerate(found.special_tokens_mask) if not mask]
        if not inner:
            return [], []
        return found.ids[: inner[0]], found.ids[inner[-1] + 1 :]


@dataclass(frozen=True)
class _Window:
    """The tokens of a stretch of a text, with their places in the whole of it."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @staticmethod
    def of(found: Any, first: int) -> _Window:
        offsets = np.array(found.offsets, dtype=np.int64).reshape(-1, 2) + first
        return _Window(np.array(found.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])

    @staticmethod
    def at(ids: list[int], place: int) -> _Window:
        """Tokens that stand for no character."""
        places = np.full(len(ids), place, dtype=np.int64)
        return _Window(np.array(ids, dtype=np.int32), places, places)

    def before(self, place: int) -> _Window:
        return self._slice(slice(None, int(np.searchsorted(self.starts, place))))

    def since(self, place: int) -> _Window:
        return self._slice(slice(int(np.searchsorted(self.starts, place)), None))

    def _slice(self, part: slice) -> _Window:
        return _Window(self.ids[part], self.starts[part], self.ends[part])


def _joint(left: _Window, right: _Window) -> int | None:
    """A character in the overlap from which on both windows have the same tokens for a while."""
    if not len(left.ids) or not len(right.ids):
        return None
    middle, last = int(right.starts[0]) + OVERLAP // 2, int(left.ends[-1])
    for place in np.intersect1d(left.since(middle).starts, right.before(last).starts):
        stop = place + AGREE
        if stop > last:
            return None
        ours, theirs = left.since(place).before(stop), right.since(place).before(stop)
        if np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.starts, theirs.starts):
            return int(place)
    return None


def _grouped(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """The texts in order, in groups that one call can take; a long text is alone in its own."""
    group: list[Text] = []
    size = 0
    for text in texts:
        length = len(text.text)
        if group and (size + length > CALL or length > TEXT_WINDOW):
            yield group
            group, size = [], 0
        group.append(text)
        size += length
        if length > TEXT_WINDOW:
            yield group
            group, size = [], 0
    if group:
        yield group


def _ended(tokens: Tokens, end: int | None) -> Tokens:
    """The document, with the token `end` at its end, trained."""
    ids, trained = tokens.ids, tokens.trained
    if end is not None:
        if not len(ids) or ids[-1] != end:
            ids = np.concatenate([ids, np.array([end], dtype=np.int32)])
            trained = np.concatenate([trained, _TRUE])
        trained[-1] = True
    return Tokens(ids, trained)


def _trained(found: Any, text: Text) -> NDArray[np.bool_]:
    """Which tokens of the encoding are trained.

    Asking the engine for the tokens at a span's two ends is much faster than bringing the offsets
    of all tokens over to Python; that is only needed where an end lies between two tokens.
    """
    if text.spans is None:
        return np.ones(len(found), dtype=np.bool_)
    trained = np.zeros(len(found), dtype=np.bool_)
    for start, end in text.spans:
        first = found.char_to_token(start)
        after = len(found) if end >= len(text.text) else found.char_to_token(end)
        if first is None or after is None:
            offsets = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
            return _overlapping(offsets[:, 0], offsets[:, 1], text.spans)
        if after < len(found) and found.token_to_chars(after)[0] < end:
            after += 1  # it starts inside the span
        trained[first:after] = True
    return trained


def _overlapping(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    spans: Spans | None,
    place: int | None = None,
) -> NDArray[np.bool_]:
    """The same from all offsets. `place` is where a token before them ends."""
    if spans is None:
        return np.ones(len(starts), dtype=np.bool_)
    # Some tokenizers leave blanks out of their offsets: count them to the token that follows.
    starts = starts.copy()
    starts[1:] = np.minimum(starts[1:], ends[:-1])
    if place is not None:
        starts[:1] = np.minimum(starts[:1], place)
    trained = np.zeros(len(starts), dtype=np.bool_)
    for start, end in spans:
        trained |= (starts < end) & ((ends > start) | (starts >= start))
    return trained
