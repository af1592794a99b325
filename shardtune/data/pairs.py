"""Source-target pairs, for models with an encoder and a decoder (T5, BART).

A document is the source's tokens and the target's, one behind the other; those of the target are
trained, all of them and no others. So everything that counts, shows or stores documents takes pairs
as they are; `PairCollator` lays them out apart. Both sides have the special tokens that the
tokenizer puts around a text, and a target ends with the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.core.step import IGNORED
from shardtune.data.control_tokens import AS_TOKENS, ControlTokens
from shardtune.data.encode import Encoder, Text, Tokens
from shardtune.data.formats import (
    MASK,
    Missing,
    RowFormat,
    instruction_row,
    instruction_settings,
    integer_column,
    renamed_columns,
    require_offsets,
    require_template_for,
    shown_places,
    text_column,
)
from shardtune.data.records import Unreadable
from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardtune.config.job import Columns, Source

PAIRS = (
    ("source", "target"),
    ("input", "output"),
    ("prompt", "completion"),
    ("document", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("question", "answer"),
    ("inputs", "targets"),
)
"""Columns that hold a source and its target in many data sets, most of them on the hub."""


class PairFormat(RowFormat):
    """Reads rows of one format as a source and a target."""

    def __init__(self, tokenizer: Any, target_length: int) -> None:
        """A target has at most `target_length` tokens."""
        self.target_length = target_length
        self._end = tokenizer.eos_token_id

    def cut(self, tokens: Tokens, length: int) -> tuple[Tokens, int]:
        """The pair with each side within its length, and how many tokens were cut off.

        A source that is cut keeps the end-of-text token that it ended with, as the tokenizer would
        put it there. A target doesn't: the model isn't to learn that the text ends there.
        """
        border = int(tokens.trained.argmax())
        source, target = tokens.ids[:border], tokens.ids[border : border + self.target_length]
        if len(source) > length:
            ended = source[-1] == self._end
            source = np.concatenate([source[: length - 1], source[-1:]]) if ended else source
            source = source[:length]
        found = pair(source, target)
        return found, len(tokens.ids) - len(found.ids)


def pair(source: NDArray[np.int32], target: NDArray[np.int32]) -> Tokens:
    """The document of a source and a target."""
    trained = np.zeros(len(source) + len(target), dtype=np.bool_)
    trained[len(source) :] = True
    return Tokens(np.concatenate([source, target]), trained)


def make_pair_format(
    source: Source, tokenizer: Any, target_length: int, control: ControlTokens = AS_TOKENS
) -> PairFormat:
    """The format that a source asks for; DataError if a pair can't be made of it."""
    require_offsets(source, tokenizer)
    if source.overflow == "split":
        fact = "overflow: split cuts one text into several, but a source belongs to its target"
        raise DataError(Problem(source.path, fact, "set overflow: truncate or drop"))
    if source.format == "source_target":
        return _SourceTarget(tokenizer, source, target_length, control)
    if source.format == "instruction" and source.template != "chat":
        return _Instruction(tokenizer, source.columns, target_length, control)
    if source.format == "pretokenized":
        return _Pretokenized(tokenizer, source.columns, target_length)
    what = "a chat template" if source.format == "instruction" else f"format: {source.format}"
    fact = f"{what} makes one sequence, but this model reads a source and writes a target"
    fix = "use format: source_target, or instruction (its output is the target)"
    raise DataError(Problem(source.path, fact, fix))


class _TextPair(PairFormat):
    """Two texts."""

    def __init__(self, tokenizer: Any, target_length: int, control: ControlTokens) -> None:
        super().__init__(tokenizer, target_length)
        self.control = control
        self._encoder = Encoder(tokenizer, control)

    def _encode(self, found: list[tuple[str, str]]) -> list[Tokens]:
        sources = self._encoder.encode([Text(one, None) for one, _ in found], special=True)
        targets = self._encoder.encode(
            [Text(one, None) for _, one in found], special=True, end=self._end
        )
        return [pair(one.ids, other.ids) for one, other in zip(sources, targets, strict=True)]


class _SourceTarget(_TextPair):
    """Two columns, by the names that the job gives or by common ones."""

    def __init__(
        self, tokenizer: Any, source: Source, target_length: int, control: ControlTokens
    ) -> None:
        super().__init__(tokenizer, target_length, control)
        self._pairs, self._prefix = _named(source.columns), source.prefix
        sources, targets = zip(*self._pairs, strict=True)
        self.required = (tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(targets)))
        settings = (self._prefix, str(target_length))
        self.settings = ("source_target", *sources, *targets, *settings)

    def _read(self, row: dict[str, Any]) -> tuple[str, str]:
        for source, target in self._pairs:
            if source in row and target in row:
                return self._prefix + text_column(row, source), text_column(row, target)
        present = next((each for each in self._pairs if each[0] in row), None)
        raise Missing(present[1] if present else self._pairs[0][0])


def _named(columns: Columns) -> list[tuple[str, str]]:
    """The pairs of columns to look for, in order."""
    source, target = columns.source, columns.target
    if source == target == "auto":
        return list(PAIRS)
    sources = dict.fromkeys(each for each, _ in PAIRS) if source == "auto" else (source,)
    targets = dict.fromkeys(each for _, each in PAIRS) if target == "auto" else (target,)
    return [(one, other) for one in sources for other in targets]


class _Instruction(_TextPair):
    """An instruction, with its material and system prompt, and its answer."""

    def __init__(
        self, tokenizer: Any, columns: Columns, target_length: int, control: ControlTokens
    ) -> None:
        super().__init__(tokenizer, target_length, control)
        self._names = columns
        self.required = ((columns.instruction,), (columns.output,))
        self.named = renamed_columns(columns, "input", "system")
        self.settings = ("instruction", "pair", *instruction_settings(columns), str(target_length))

    def _read(self, row: dict[str, Any]) -> tuple[str, str]:
        require_template_for(row)
        system, question, answer = instruction_row(row, self._names)
        return f"{system}\n\n{question}" if system else question, answer


class _Pretokenized(PairFormat):
    """Token ids of the source, and labels of their own length; either may be padded, as
    `tokenizer(padding="max_length")` stores them."""

    def __init__(self, tokenizer: Any, columns: Columns, target_length: int) -> None:
        super().__init__(tokenizer, target_length)
        self._ids, self._labels = columns.input_ids, columns.labels
        self._vocabulary, self._pad = len(tokenizer), tokenizer.pad_token_id
        self.required = ((self._ids,), (self._labels,))
        padding = (MASK, str(self._pad), str(self._end))
        names = (self._ids, self._labels)
        self.settings = ("pretokenized", "pair", *names, *padding, str(target_length))

    def _read(self, row: dict[str, Any]) -> Tokens:
        source, target = self._source(row), self._target(row)
        for name, ids in ((self._ids, source), (self._labels, target)):
            wrong = ids[(ids < 0) | (ids >= self._vocabulary)]
            if len(wrong):
                most = self._vocabulary - 1
                raise Unreadable(f"{name!r} holds {wrong[0]}, but token ids go from 0 to {most}")
        return pair(source.astype(np.int32), target.astype(np.int32))

    def _source(self, row: dict[str, Any]) -> NDArray[np.int64]:
        """The ids that the row's attention mask shows, or all where it has none."""
        ids = integer_column(row, self._ids)
        shown: NDArray[np.int64] = ids[shown_places(row, ids, self._ids)]
        return shown

    def _target(self, row: dict[str, Any]) -> NDArray[np.int64]:
        """The labels without the padding behind them. Where it is the end-of-text token that pads,
        the first one ends the target."""
        labels = integer_column(row, self._labels)
        target = labels[: _end_of(labels != IGNORED)]
        if not len(target):
            raise Unreadable(f"{self._labels!r} holds nothing but {IGNORED}")
        if self._pad is None:
            return target
        end = _end_of(target != self._pad)
        if self._pad == self._end:
            end += 1
        if not end:
            raise Unreadable(f"{self._labels!r} holds nothing but padding ({self._pad})")
        return target[:end]

    def _encode(self, found: list[Tokens]) -> Sequence[Tokens]:
        return found


def _end_of(flags: NDArray[np.bool_]) -> int:
    """The place behind the last one that is true."""
    found = np.flatnonzero(flags)
    return int(found[-1]) + 1 if len(found) else 0
