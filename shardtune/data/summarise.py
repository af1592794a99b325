"""Summarises prepared data for the run's report: what `shardtune data` shows, as a record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from shardtune.core.runs.data_summary import (
    DataSetSummary,
    DataSummary,
    DocumentExample,
    TextPiece,
)
from shardtune.data.dataset import PreparedData, PreparedSet
from shardtune.data.inspect import BARS, special_tokens, trained_pieces
from shardtune.data.loader import Loader

SHOWN_DOCUMENTS = 2  # documents of a set
SETS_SHOWN = 12  # that have any
MOST_TOKENS = 600  # of a document


def summarise(prepared: PreparedData, loader: Loader, tokenizer: Any, length: int) -> DataSummary:
    """The figures of every set, and the first documents of some."""
    sides: tuple[tuple[Literal["train", "eval"], tuple[PreparedSet, ...]], ...] = (
        ("train", prepared.train),
        ("eval", prepared.eval),
    )
    sets = [(side, each) for side, found in sides for each in found]
    return DataSummary(
        sequence_length=length,
        packing=loader.packing,
        fill=loader.fill(),
        paired=any(each.paired for each in prepared.train),
        sets=tuple(
            _summary(side, each, tokenizer, SHOWN_DOCUMENTS if number < SETS_SHOWN else 0)
            for number, (side, each) in enumerate(sets)
        ),
    )


def _summary(
    side: Literal["train", "eval"], one: PreparedSet, tokenizer: Any, examples: int
) -> DataSetSummary:
    report, lengths = one.report, one.lengths
    middle, high = np.percentile(lengths, [50, 95])
    longest = int(lengths.max())
    counts, _ = np.histogram(lengths, bins=BARS, range=(0, max(longest, 1)))
    unique = None if one.checks is None else len(np.unique(one.checks))
    shown = range(min(examples, len(one.rows)))
    return DataSetSummary(
        side=side,
        name=one.name,
        format=report.format,
        weight=one.weight,
        rows=report.rows_read,
        documents=report.documents,
        tokens=report.tokens,
        labels=report.labels,
        ends_trained=report.stops_trained,
        length_p50=round(float(middle)),
        length_p95=round(float(high)),
        length_max=longest,
        lengths=tuple(map(int, counts)),
        truncated=report.truncated,
        truncated_tokens=report.truncated_tokens,
        split=report.split,
        too_long=report.dropped,
        untrained=report.untrained,
        unreadable=report.bad,
        duplicates=None if unique is None else len(lengths) - unique,
        notes=report.notes,
        examples=tuple(_example(one, number, tokenizer) for number in shown),
    )


def _example(one: PreparedSet, number: int, tokenizer: Any) -> DocumentExample:
    row, special = one.rows[number], special_tokens(tokenizer)
    ids, trained = row["input_ids"][:MOST_TOKENS], row["trained"][:MOST_TOKENS]
    pieces = [
        TextPiece(text=text, trained=is_trained, special=is_special)
        for piece, is_trained in trained_pieces(ids, trained, tokenizer)
        for text, is_special in _split(piece, special)
    ]
    return DocumentExample(
        name=f"{one.name}:{number}",
        tokens=int(one.lengths[number]),
        labels=int(one.labels[number]),
        pieces=tuple(pieces),
        cut=len(row["input_ids"]) > MOST_TOKENS,
    )


def _split(piece: str, special: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    """The piece with its special tokens apart."""
    for part in special.split(piece) if special else [piece]:
        if part:
            yield part, special is not None and special.fullmatch(part) is not None
