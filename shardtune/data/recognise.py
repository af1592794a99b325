"""Recognises the format of a data set by its columns, and measures a sample of its rows.

For who has no job yet. A column counts by its name, in upper or lower case, and by what it holds:
`messages` that are numbers are no conversation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardtune.config.job import Columns, Format, TrainSource
from shardtune.data.column_advice import (
    HEADER_WORDS,
    PREFERRED,
    ColumnAdvice,
    header_advice,
    judged_advice,
    nested_advice,
    number_advice,
    parted_turns_advice,
    preference_advice,
)
from shardtune.data.data_file import TURNS, OpenedSource
from shardtune.data.formats import RowFormat, make_format
from shardtune.data.pairs import PAIRS, PairFormat, make_pair_format
from shardtune.data.records import NOT_UTF8, TO_UTF8, BadRow, SourceRecord
from shardtune.data.sources import open_source
from shardtune.data.validate import USUAL_NAMES
from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardtune.core.model.kind import ModelKind
    from shardtune.data.readers import SourcePart

SAMPLE_ROWS = 500
READ_WHOLE_BYTES = 64 << 20  # of a larger source that knows its count only some parts are read
SAMPLED_PARTS = 16

_QUESTIONS, _ANSWERS = USUAL_NAMES["instruction"], USUAL_NAMES["output"]
_MATERIAL = ("input", "context")
_SYSTEM = ("system", "system_prompt")
_JUDGED = ("label", "labels", "kto_tag")
_LOOKED_FOR: dict[ModelKind, str] = {
    "decoder": "messages or conversations (chat); instruction and output, or the like of prompt "
    "and response (instruction); text (completion); input_ids (pretokenized)",
    "encoder_decoder": "instruction and output (instruction); the like of source and target, input "
    "and output, document and summary (source_target); input_ids and labels (pretokenized)",
}

Test: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True)
class SampledSource:
    """A data set that was found, how many rows it has, and some of them."""

    opened: OpenedSource
    rows: int
    exact: bool
    """Whether the rows were counted; else it is about so many."""
    sample: tuple[SourceRecord, ...]

    @property
    def path(self) -> str:
        return self.opened.path

    @property
    def columns(self) -> dict[str, None]:
        """The columns that rows of the sample have, in order."""
        return dict.fromkeys(chain.from_iterable(row.value for row in self.sample))

    @property
    def different_rows(self) -> int:
        """About how many rows are no copies of others."""
        different = len({repr(row.value) for row in self.sample})
        return round(self.rows * different / len(self.sample))


@dataclass(frozen=True)
class RecognisedFormat:
    """How rows are to be read."""

    format: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    """What a job has to say about columns (`data.train.0.columns`)."""


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of the sampled rows that could be read."""

    lengths: NDArray[np.int64]
    """Of a row; of its source where it is a pair."""
    targets: NDArray[np.int64] | None
    """Of the targets of pairs."""
    stopped: int
    """Rows whose last trained token is a stop token."""
    unread: int
    """Rows of the sample that can't be read."""


def sample_source(path: str) -> SampledSource:
    """Opens the data set and draws rows, always the same ones; DataError where there are none."""
    opened = open_source(TrainSource(path=path, format="completion"))
    parts: Sequence[SourcePart] = opened.parts
    whole = opened.count is None or opened.size <= READ_WHOLE_BYTES
    if not whole:
        parts = parts[:: -(-len(parts) // SAMPLED_PARTS)]
    draw = random.Random(0)  # noqa: S311 - no secret hangs on it
    sample: list[SourceRecord] = []
    rows, bad = 0, None
    for row in _rows(parts):
        rows += 1
        if isinstance(row, BadRow):
            bad = bad or row
        elif len(sample) < SAMPLE_ROWS:
            sample.append(row)
        elif (place := draw.randrange(rows)) < SAMPLE_ROWS:  # each row is as likely as any other
            sample[place] = row
    if not rows:
        raise DataError(Problem(path, "is empty: it holds no rows", "name a file with data"))
    if not sample:
        assert bad is not None
        fact = f"none of the {rows:,} sampled rows can be read: {bad.reason}"
        encoded = bad.reason.startswith(NOT_UTF8)
        fix = f"save it as UTF-8: {TO_UTF8}" if encoded else "fix the file"
        raise DataError(Problem(opened.place(bad.number, bad.column), fact, fix))
    return SampledSource(opened, rows if whole else opened.count or rows, whole, tuple(sample))


def _rows(parts: Sequence[SourcePart]) -> Iterator[SourceRecord | BadRow]:
    for part in parts:
        yield from part.rows()


def recognise(source: SampledSource, kind: ModelKind) -> RecognisedFormat:
    """The format that its columns make, as a model of `kind` reads it; DataError says what was
    seen and what was looked for."""
    table = _Table(source.sample, source.columns)
    found = _as_pairs(table) if kind == "encoder_decoder" else _as_sequences(table)
    if found is not None:
        if judged := table.find(_JUDGED, _is_verdict):
            rated = judged_advice(judged)
            raise DataError(Problem(source.path, rated.fact, rated.fix))
        return found
    seen = ", ".join(f"{_short(name)!r} ({table.holds(name)})" for name in [*source.columns][:12])
    model = "a model with an encoder" if kind == "encoder_decoder" else "this model"
    fact = f"its columns make no format that {model} reads: it has {seen}; "
    if advice := _advice(table):
        raise DataError(Problem(source.path, fact + advice.fact, advice.fix))
    wanted = "source: NAME, target: NAME" if kind == "encoder_decoder" else "text: NAME"
    fix = f"rename its columns, or write a job that names them: columns: {{{wanted}}}"
    raise DataError(Problem(source.path, f"{fact}looked for {_LOOKED_FOR[kind]}", fix))


def measure_lengths(
    source: SampledSource,
    setting: TrainSource,
    tokenizer: Any,
    stop_ids: frozenset[int],
    kind: ModelKind,
) -> SampleLengths:
    """Tokens of the sampled rows, read as `setting` says; DataError if none can be read."""
    format: RowFormat
    if kind == "encoder_decoder":
        format = make_pair_format(setting, tokenizer, np.iinfo(np.int32).max)
    else:
        format = make_format(setting, tokenizer)
    documents = format.documents(source.sample)
    good = [each for each in documents if not isinstance(each, BadRow)]
    good = [each for each in good if each.trained.any()]
    if not good:
        bad = next((each for each in documents if isinstance(each, BadRow)), None)
        why = bad.reason if bad else "no token of them would be trained"
        fact = f"none of {len(documents):,} sampled rows can be read as {setting.format}: {why}"
        raise DataError(Problem(source.path, fact, "correct the rows, or the format in a job"))
    lengths = np.array([len(each.ids) for each in good], dtype=np.int64)
    targets = None
    if isinstance(format, PairFormat):
        targets = np.array([each.trained.sum() for each in good], dtype=np.int64)
        lengths = lengths - targets
    stopped = sum(int(each.ids[np.flatnonzero(each.trained)[-1]]) in stop_ids for each in good)
    return SampleLengths(lengths, targets, stopped, len(documents) - len(good))


# What columns make -------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_turns(value: Any) -> bool:
    """Turns as a list of objects, or as the JSON text of one."""
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)


def _is_objects(value: Any) -> bool:
    """An object, or a list of such that are no turns (the instances of an instruction)."""
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(
        isinstance(each, dict) and not each.keys() & {"role", "from"} for each in listed
    )


def _is_questions(value: Any) -> bool:
    """Dialogues, each a list of turns, of which none is an answer."""
    if not (isinstance(value, list) and value and all(isinstance(each, list) for each in value)):
        return False
    turns = [turn for dialogue in value for turn in dialogue]
    roles = {turn.get("role") if isinstance(turn, dict) else None for turn in turns}
    return bool(roles) and roles <= {"user", "system"}


def _is_verdict(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


@dataclass(frozen=True)
class _Table:
    """Columns by name and by what they hold."""

    rows: Sequence[SourceRecord]
    names: Mapping[str, None]

    def find(self, wanted: Sequence[str], test: Test = _is_text) -> str:
        """The first of these columns that is there and holds such values, as it is spelt."""
        for name in wanted:
            for spelt in self.names:
                if spelt.lower() == name and self._most(spelt, test):
                    return spelt
        return ""

    def holds(self, name: str) -> str:
        """What a column holds, in a word."""
        kinds = {
            "text": _is_text,
            "token ids": _is_ids,
            "objects": _is_objects,
            "turns": _is_turns,
            "lists of turns": _is_questions,
        }
        for word, test in kinds.items():
            if self._most(name, test):
                return word
        value = next(iter(self._values(name)), None)
        return "nothing" if value is None else type(value).__name__

    def objects_in(self, name: str) -> tuple[list[str], bool]:
        """The keys of the first object in a column, and whether it lies in a list."""
        found: Any = next(filter(None, self._values(name)), {})
        listed = isinstance(found, list)
        return list(map(str, found[0] if listed else found)), listed

    def _most(self, name: str, test: Test) -> bool:
        values = self._values(name)
        return 2 * sum(map(test, values)) > len(values)

    def _values(self, name: str) -> list[Any]:
        return [row.value[name] for row in self.rows if row.value.get(name) is not None]


def _advice(table: _Table) -> ColumnAdvice | None:
    """What a set is whose columns make no format, where that can be told."""
    names = [name.lower() for name in table.names]
    turns = bool(table.find((PREFERRED,), _is_turns))
    if advice := preference_advice(names, turns=turns):
        return advice
    for one, other in (("prompt", "completion"), ("prompt", "response")):
        if table.find((one,), _is_turns) and table.find((other,), _is_turns):
            return parted_turns_advice(one, other)
    if asked := table.find(names, _is_questions):
        return ColumnAdvice(
            f"{asked!r} has questions, and no column has their answers",
            "training needs each answer, too, as an assistant's turn behind its question in one "
            "list of turns, `messages`; `shardtune evaluate` is for questions of a benchmark",
        )
    if nested := table.find(names, _is_objects):
        return nested_advice(nested, *table.objects_in(nested))
    usual = (("instruction", "output"), ("prompt", "completion"), ("question", "answer"))
    for pair in usual:
        if numbers := [name for name in pair if table.find((name,), _is_number)]:
            return number_advice(numbers)
    long = next((name for name in table.names if len(name) > HEADER_WORDS), None)
    return None if long is None else header_advice(long)


def _short(name: str) -> str:
    return name if len(name) <= HEADER_WORDS else f"{name[:HEADER_WORDS]}..."


def _as_sequences(table: _Table) -> RecognisedFormat | None:
    """As a decoder alone reads rows."""
    if turns := table.find((*TURNS, *USUAL_NAMES["messages"]), _is_turns):
        return RecognisedFormat("chat", {} if turns in TURNS else {"messages": turns})
    if (question := table.find(("instruction",))) and (answer := _answer(table)):
        return _instruction(table, question, answer)
    if ids := table.find(("input_ids", *USUAL_NAMES["input_ids"]), _is_ids):
        return _named("pretokenized", input_ids=ids)
    if pair := _pair(table):
        return _instruction(table, *pair)
    if text := table.find(("text", *USUAL_NAMES["text"])):
        return _named("completion", text=text)
    return None


def _as_pairs(table: _Table) -> RecognisedFormat | None:
    """As an encoder and a decoder read them."""
    if (question := table.find(("instruction",))) and (answer := _answer(table)):
        return _instruction(table, question, answer)
    ids = table.find(("input_ids", *USUAL_NAMES["input_ids"]), _is_ids)
    if ids and (labels := table.find(("labels",), _is_ids)):
        return _named("pretokenized", input_ids=ids, labels=labels)
    if pair := _pair(table):
        return _named("source_target", source=pair[0], target=pair[1])
    return None


def _answer(table: _Table) -> str:
    return table.find(("output", *_ANSWERS))


def _pair(table: _Table) -> tuple[str, str] | None:
    """Two columns that often are a question and its answer."""
    usual = ((question, answer) for question in _QUESTIONS for answer in ("output", *_ANSWERS))
    for one, other in chain(PAIRS, usual):
        if (source := table.find((one,))) and (target := table.find((other,))):
            return source, target
    return None


def _instruction(table: _Table, question: str, answer: str) -> RecognisedFormat:
    further = {"input": table.find(_MATERIAL), "system": table.find(_SYSTEM)}
    taken = {key: name for key, name in further.items() if name not in ("", question, answer)}
    return _named("instruction", instruction=question, output=answer, **taken)


def _named(format: Format, **columns: str) -> RecognisedFormat:
    """The format with those columns that are called otherwise than it expects."""
    usual = Columns.model_fields
    return RecognisedFormat(
        format, {key: name for key, name in columns.items() if name != usual[key].default}
    )
