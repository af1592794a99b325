"""Looks at prepared data before any step is made, and says everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.config.job import TrainSource
from shardtune.core.model.chat_templates import (
    KWARGS_KEY,
    TEMPLATE_KEY,
    TEMPLATE_TOKENS,
    TOOL_TEMPLATES,
)
from shardtune.data.chat_template import ASKED_OTHERWISE
from shardtune.data.column_advice import preference_advice
from shardtune.data.records import CONTROL_IN_TEXT, NOT_UTF8, TO_UTF8
from shardtune.errors import Problem, did_you_mean

if TYPE_CHECKING:
    from shardtune.config.job import DataSection, Source
    from shardtune.data.chat_template import ChatTemplate
    from shardtune.data.complaints import Complaint
    from shardtune.data.data_file import OpenedSource
    from shardtune.data.formats import RowFormat
    from shardtune.data.tokenize import DocumentIndex, RowCounts

LISTED = 20  # kinds of complaints about a data set that are told
LEAKS_LISTED = 5

FORMATS = {
    "instruction": (("instruction", "output"),),
    "chat": (("messages",), ("conversations",)),
    "completion": (("text",),),
    "pretokenized": (("input_ids",),),
}
"""The columns by which a format is recognised."""

USUAL_NAMES = {
    "instruction": ("prompt", "question", "query", "task", "text", "input", "inputs"),
    "output": (
        "response",
        "answer",
        "completion",
        "target",
        "code",
        "solution",
        "label",
        "targets",
    ),
    "messages": ("conversation", "dialog", "dialogue", "turns", "chat"),
    "text": ("content", "document", "body", "story"),
    "input_ids": ("tokens", "ids", "token_ids"),
}
"""What other people call these columns, where the spelling doesn't give it away."""


@dataclass(frozen=True)
class CheckedSource:
    """A data set, and what its preparation found."""

    source: Source
    opened: OpenedSource
    format: RowFormat
    tally: RowCounts
    index: DocumentIndex

    @property
    def path(self) -> str:
        return self.opened.path

    def stops_trained(self, stops: frozenset[int]) -> int:
        """Documents whose last trained token is a stop token."""
        return int(np.isin(self.index.finals, sorted(stops)).sum())


def check_source(checked: CheckedSource, section: DataSection) -> list[Problem]:
    """What is wrong with one data set by itself."""
    tally = checked.tally
    if not tally.rows:
        fix = "name a file with data, or take the set out of the job"
        return [Problem(checked.path, "is empty: it holds no rows", fix)]
    problems = _wrong_columns(checked)
    if section.bad_rows == "fail" or tally.bad == tally.rows:
        problems += _bad_rows(checked, columns_told=bool(problems))
    if not problems and not len(checked.index.lengths):
        problems.append(_nothing_left(checked, section.sequence_length))
    return problems


def bad_row_lines(checked: CheckedSource) -> list[str]:
    """A line for each kind of complaint about the rows, as far as they are listed."""
    problems = _bad_rows(checked, columns_told=False)
    return [f"{problem.place}: {problem.fact}" for problem in problems]


def _bad_rows(checked: CheckedSource, *, columns_told: bool) -> list[Problem]:
    """What is wrong with rows, most frequent first, and how many there are.

    Where a column is missing everywhere that was told already; then these rows are left out.
    """
    tally = checked.tally
    told = [
        complaint
        for complaint in tally.complaints
        if not (columns_told and complaint.examples[0].missing)
    ]
    total = sum(complaint.count for complaint in told)
    if not total:
        return []
    told.sort(key=lambda complaint: -complaint.count)
    problems = [_complaint(complaint, checked) for complaint in told[:LISTED]]
    rest = sum(complaint.count for complaint in told[LISTED:])
    more = f" ({rest:,} for reasons that aren't listed here)" if rest else ""
    fact = f"{total:,} of {tally.rows:,} rows can't be used{more}"
    mend = _mend(told)
    fix = f"{mend}, or set data.bad_rows: skip to go on without them"
    if tally.bad == tally.rows:
        fix = f"{mend}: no usable row is left"
    if all(complaint.culprit == "template" for complaint in told):
        return problems  # each with its fix: the rows need none
    return [*problems, Problem(checked.path, fact, fix)]


def _mend(complaints: Sequence[Complaint]) -> str:
    """What would make all of these rows usable."""
    known = {
        NOT_UTF8: f"save the file as UTF-8 ({TO_UTF8})",
        CONTROL_IN_TEXT: "set data.control_tokens: text (or token)",
    }
    for start, mend in known.items():
        if all(complaint.reason.startswith(start) for complaint in complaints):
            return mend
    return "fix them"


def _complaint(complaint: Complaint, checked: CheckedSource) -> Problem:
    """One kind of complaint: of a single row, of many, or of what all of them went through."""
    places = [checked.opened.place(row.number, row.column) for row in complaint.examples]
    shown = ", ".join(places) + (", ..." if complaint.count > len(places) else "")
    if complaint.culprit == "template":
        fact = f"{complaint.reason}; {complaint.count:,} of {checked.tally.rows:,} rows need that"
        fix = _other_template(complaint.reason, checked.format.template)
        if checked.tally.bad < checked.tally.rows:
            fix += "; or data.bad_rows: skip, to go on without these rows"
        return Problem("the chat template", f"{fact} ({shown})", fix)
    if complaint.count == 1:
        return Problem(places[0], complaint.reason)
    like = "" if complaint.same else " like this"
    fact = f"{complaint.count:,} rows{like}: {complaint.reason} ({shown})"
    return Problem(checked.path, fact)


_THINKS = f"or in {KWARGS_KEY} leave thinking on, if that turns it off"


def _other_template(reason: str, template: ChatTemplate | None) -> str:
    """The fix for what a chat template can't write: those by name can't write all of it either."""
    if reason.startswith(f"can't write a question and its answer: {ASKED_OTHERWISE}"):
        return _other_prompt(template)
    if reason.startswith("can't write reasoning beside"):
        fix = "write it into the content, as <think>...</think> before the answer"
        return f"{fix}; or {TEMPLATE_KEY}: a file that can; {_THINKS}"
    if reason.startswith("can't write reasoning in"):
        return f"{TEMPLATE_KEY}: a file that can; {_THINKS}"
    names = ", ".join(TOOL_TEMPLATES if reason.startswith("can't write tool") else TEMPLATE_TOKENS)
    return f"{TEMPLATE_KEY}: one that can, as a file or by name ({names})"


def _other_prompt(template: ChatTemplate | None) -> str:
    """The fix for a generation prompt that opens what the rows don't have, reasoning mostly."""
    names = ", ".join(TEMPLATE_TOKENS)
    copy = f"{TEMPLATE_KEY}: a copy of it that asks as these rows begin"
    setting = template.thought_setting if template else {}
    if template is None or not setting:
        return f"{copy} ({KWARGS_KEY} has nothing for that), or one by name ({names})"
    ((name, value),) = setting.items()
    if value:
        return (
            f"{copy}, or one by name ({names}); or {KWARGS_KEY}: {{{name}: true}}, if its prompts "
            "are to ask for reasoning as well"
        )
    alone = "" if template.thinks_with(setting) else " (rows with reasoning don't fit then)"
    return (
        f"{KWARGS_KEY}: {{{name}: false}}, with which it asks as these rows begin{alone}; or "
        f"{TEMPLATE_KEY}: one that does, as a file or by name ({names})"
    )


def _wrong_columns(checked: CheckedSource) -> list[Problem]:
    """Columns that the format needs or the job names, and that no row has."""
    seen = list(checked.tally.columns)
    if not seen:
        return []
    none_made = not len(checked.index.lengths)
    lacking = [
        names[0] for names in checked.format.required if none_made and not {*names} & {*seen}
    ]
    lacking += [name for name in checked.format.named if name not in seen]
    if not lacking:
        return []
    columns = checked.source.columns
    key_of = {getattr(columns, key): key for key in type(columns).model_fields}
    for key in ("messages", "source", "target"):
        key_of.setdefault(key, key)  # where the job leaves it at `auto`
    found: dict[str, str] = {}
    for name in lacking:
        free = [column for column in seen if column not in found.values()]
        if near := _nearest(name, key_of[name], free):
            found[key_of[name]] = near
    shown = found or {key_of[lacking[0]]: "<one of these>"}
    fix = f"columns: {{{', '.join(f'{key}: {name}' for key, name in shown.items())}}}"
    others = [
        name
        for name, choices in FORMATS.items()
        if name != checked.source.format and any({*choice} <= {*seen} for choice in choices)
    ]
    if others:
        fix = f"format: {others[0]}"
    fact = f"no row has {_quoted(lacking, 'the column')}; the columns are {_quoted(seen)}"
    if not others and (advice := preference_advice(seen)):
        fact, fix = f"{fact}; {advice.fact}", advice.fix
    return [Problem(checked.path, fact, fix)]


def _nearest(name: str, key: str, seen: list[str]) -> str:
    if near := did_you_mean(name, seen):
        return near
    return next((usual for usual in (key, *USUAL_NAMES.get(key, ())) if usual in seen), "")


def _nothing_left(checked: CheckedSource, length: int) -> Problem:
    """Why a data set with good rows has become no documents."""
    tally = checked.tally
    facts = []
    if tally.dropped:
        facts.append(f"{tally.dropped:,} are longer than data.sequence_length ({length})")
    if tally.untrained:
        facts.append(f"{tally.untrained:,} have no trained token in their first {length}")
    if tally.bad:
        facts.append(f"{tally.bad:,} can't be used")
    fact = f"no trained token is left of its {tally.rows:,} rows: {', '.join(facts)}"
    if tally.longest > length:
        fix = f"raise data.sequence_length: the longest row has {tally.longest:,} tokens"
    else:
        fix = "give rows that hold something to learn"
    return Problem(checked.path, fact, fix)


def check_stops(
    checked: CheckedSource, section: DataSection, tokenizer: Any, stops: frozenset[int]
) -> list[Problem]:
    """A set to train on in which no document ends with a stop token teaches never to stop."""
    finals = checked.index.finals
    if not len(finals) or checked.stops_trained(stops) or may_go_on(checked, section):
        return []
    names = ", ".join(repr(tokenizer.convert_ids_to_tokens(stop)) for stop in sorted(stops))
    fact = "a stop token is never trained: "
    fact += f"none of its {len(finals):,} documents ends with {names}" if stops else "there is none"
    ids, counts = np.unique(finals, return_counts=True)
    last, share = int(ids[counts.argmax()]), counts.max() / len(finals)
    cut = checked.tally.truncated
    if last in tokenizer.added_tokens_decoder:
        terminator = tokenizer.convert_ids_to_tokens(last)
        fact += f"; {share:.0%} of them end with {terminator!r}"
        fix = f'model.stop_tokens: ["{terminator}"]'
    elif cut == len(finals):
        fact += f", because all of them are cut off at {section.sequence_length} tokens"
        fix = f"raise data.sequence_length: the longest row has {checked.tally.longest:,} tokens"
        if checked.format.can_split:
            fix += "; or cut rows into several documents: overflow: split"
    elif checked.source.format == "pretokenized":
        fix = "end each row's ids with a stop token, and don't mask it in the labels"
        lengths = checked.index.lengths
        if len(lengths) > 1 and (lengths == lengths[0]).all():
            fix = f"data.sequence_length: {lengths[0]}, if these are a corpus cut into windows"
    elif tokenizer.eos_token is None:
        fix = "the tokenizer has no end-of-text token: set eos_token in its tokenizer_config.json"
    else:
        fix = f"use a chat template that ends an answer with {names or repr(tokenizer.eos_token)}"
    fix += "; or stop: none beside its path, to train it without"
    return [Problem(checked.path, fact, fix)]


def may_go_on(checked: CheckedSource, section: DataSection) -> bool:
    """Whether a set may do without stop tokens: the job says so, or it is one text in windows."""
    asked = checked.source.stop if isinstance(checked.source, TrainSource) else "none"
    return asked == "none" or is_windows(checked, section)


def is_windows(checked: CheckedSource, section: DataSection) -> bool:
    """Whether this is a corpus of token ids cut into windows: rows that fill the sequence, all but
    the last, and that weren't cut here."""
    lengths, cut = checked.index.lengths, checked.tally.truncated
    return (
        checked.source.format == "pretokenized"
        and len(lengths) > 1
        and not cut
        and bool((lengths[:-1] == section.sequence_length).all())
    )


def notes(checked: CheckedSource, section: DataSection, stops: frozenset[int]) -> tuple[str, ...]:
    """What a person should know about a set that is good."""
    tally, told = checked.tally, []
    if checked.opened.note:
        told.append(checked.opened.note)
    if is_windows(checked, section) and not checked.stops_trained(stops):
        told.append(
            f"rows of {section.sequence_length:,} token ids that fill the sequence, none of which "
            "ends with a stop token: a corpus cut into windows, trained as it is"
        )
    if tally.truncated and checked.format.can_split:
        told.append(
            f"{tally.truncated:,} of {tally.rows:,} rows are longer than "
            f"data.sequence_length ({section.sequence_length}): {tally.truncated_tokens:,} tokens "
            "at their ends are not trained; overflow: split trains them as further documents"
        )
    return tuple(told)


def check_leaks(train: Sequence[CheckedSource], held_out: Sequence[CheckedSource]) -> list[Problem]:
    """Documents to train on that stand in an evaluation set as they are."""
    return [
        problem
        for evaluated in held_out
        for trained in train
        for problem in _leaks(trained, evaluated)
    ]


def _leaks(trained: CheckedSource, evaluated: CheckedSource) -> list[Problem]:
    held_out = {digest: at for at, digest in reversed(list(enumerate(_keys(evaluated.index))))}
    pairs = [
        (at, held_out[digest])
        for at, digest in enumerate(_keys(trained.index))
        if digest in held_out
    ]
    if not pairs:
        return []
    shown = [
        f"{trained.opened.place(int(trained.index.numbers[ours]))} is "
        f"{evaluated.opened.place(int(evaluated.index.numbers[theirs]))}"
        for ours, theirs in pairs[:LEAKS_LISTED]
    ]
    if len(pairs) > LEAKS_LISTED:
        shown.append(f"{len(pairs) - LEAKS_LISTED:,} more")
    fact = (
        f"{len(pairs):,} of its {len(trained.index.lengths):,} documents stand in the evaluation "
        f"set {evaluated.path} too: {', '.join(shown)}"
    )
    fix = "take them out of one of the two: a model that has seen the answers proves nothing"
    return [Problem(trained.path, fact, fix)]


def _keys(index: DocumentIndex) -> list[bytes]:
    """The documents' hashes."""
    whole = index.digests.tobytes()
    return [whole[start : start + 16] for start in range(0, len(whole), 16)]


def _quoted(names: Sequence[str], each: str = "") -> str:
    shown = [f"{each} {name!r}".strip() for name in names[:12]]
    return ", ".join(shown) + (", ..." if len(names) > 12 else "")
