"""Rows of a task: read from a file or the hub, and rendered into questions and references."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

from shardtune.compat.hub_dataset import load_dataset
from shardtune.errors import DataError, JobError, Problem
from shardtune.evaluation.answer_metrics import (
    ChoiceMetric,
    Contains,
    JsonMetric,
    Number,
    Reference,
)
from shardtune.evaluation.respondent import TaskQuestion
from shardtune.evaluation.task import Task

_FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True)
class TaskRow:
    """One question of a task."""

    number: int
    """In its file, from 0."""
    question: TaskQuestion
    context: str
    """The question as plain text, with its examples."""
    reference: Reference


def open_rows(task: Task, *, has_template: bool) -> list[TaskRow]:
    """All rows that are asked. Examples that come from the same file are not."""
    own = bool(task.shots) and not task.shots_path and not _has_splits(task.path)
    spare = task.shots if own else 0
    # Examples by a field may stand anywhere in the file.
    wanted = None if task.limit is None or (own and task.shots_by) else task.limit + spare
    rows = _with_answers(task, list(islice(read_rows(task.path, task.subset, task.split), wanted)))
    shots = _examples(task, rows if own else _shot_rows(task))
    taken = {id(row) for group in shots.values() for row in group} if own else set()
    asked = [(number, row) for number, row in enumerate(rows) if id(row) not in taken]
    asked = asked[: task.limit]
    groups = [_group(task, row) for _, row in asked] or [_group(task, row) for row in rows]
    for group in groups:
        if len(found := shots[group]) < task.shots:
            of = f" of {task.shots_by} {group!r}" if task.shots_by else ""
            fact = f"{task.shots} examples{of} are wanted, {len(found)} are there"
            fix = "set shots to that, or name another shots_path"
            raise DataError(Problem(task.name, fact, fix))
    if not asked:
        raise DataError(Problem(task.path, "has no row to ask", "name another file"))
    chat = uses_chat(task, has_template)
    rendered = [
        render_row(task, row, shots[_group(task, row)], number, chat=chat) for number, row in asked
    ]
    if isinstance(task.metric, (Contains, JsonMetric, Number)):
        for each in rendered:
            task.metric.require(each.reference, f"{task.name}: row {each.number}")
    return rendered


def _shot_rows(task: Task) -> Iterable[Mapping[str, Any]]:
    if not task.shots:
        return ()
    return read_rows(task.shots_path or task.path, task.subset, task.shots_split)


def _examples(
    task: Task, rows: Iterable[Mapping[str, Any]]
) -> Mapping[str, list[Mapping[str, Any]]]:
    """The first rows of each group."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        group = found[_group(task, row)]
        if len(group) < task.shots:
            group.append(row)
        elif not task.shots_by:
            break
    return found


def _group(task: Task, row: Mapping[str, Any]) -> str:
    return str(row.get(task.shots_by, "")) if task.shots_by else ""


def _with_answers(task: Task, rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not task.answers_path:
        return rows
    found: dict[object, Mapping[str, Any]] = {}
    for row in read_rows(task.answers_path, None, ""):
        if (name := _id(row, task.answers_path)) in found:
            fact = f"has two answers to {name!r}"
            raise DataError(Problem(task.answers_path, fact, "leave one of them out"))
        found[name] = row
    if missing := [name for row in rows if (name := _id(row, task.path)) not in found]:
        fact = (
            f"has no answer to {len(missing)} row{'s' * (len(missing) > 1)}, such as {missing[0]!r}"
        )
        raise DataError(Problem(task.answers_path, fact, "name the file that belongs to the rows"))
    return [{**found[_id(row, task.path)], **row} for row in rows]


def _id(row: Mapping[str, Any], path: str) -> str | int:
    """By what the rows of two files belong together."""
    if not isinstance(name := row.get("id"), (str, int)):
        fact = f"a row has no id that is a text or a number; its fields are {', '.join(row)}"
        raise DataError(Problem(path, fact, "answers_path needs the same `id` in both files"))
    return name


def uses_chat(task: Task, has_template: bool) -> bool:
    """Whether questions go through the chat template."""
    if task.chat != "auto":
        if task.chat and not has_template:
            fact, fix = "chat: true, but the model has no chat template", "set chat: false"
            raise DataError(Problem(task.name, fact, fix))
        return task.chat
    return has_template and not task.shots and not isinstance(task.metric, ChoiceMetric)


def require_framed(task: Task, *, has_template: bool, plain: bool) -> None:
    """Refuses a dialogue of examples for a run that learnt single questions, under `plain`
    headings."""
    if uses_chat(task, has_template) and task.shots and plain:
        fact = "chat: true with examples, but the run learnt single questions (plain)"
        raise JobError(Problem(task.name, fact, "set chat: false, or shots: 0"))


def read_rows(path: str, subset: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a local file, or of a data set of the hub."""
    file = Path(path).expanduser()
    if _has_splits(path):
        yield from _hub_rows(path, subset, split)
    elif file.suffix == ".parquet":
        yield from _parquet_rows(file)
    else:
        yield from _json_rows(file)


def _has_splits(path: str) -> bool:
    """Whether this is a data set of the hub, or a folder in its form, rather than a file."""
    file = Path(path).expanduser()
    return file.is_dir() or not file.suffix or not _is_local(file, path)


def _is_local(file: Path, path: str) -> bool:
    if file.is_file():
        return True
    if path.count("/") == 1 and not path.startswith((".", "/", "~")) and "." not in file.name:
        return False
    fix = "name a JSON Lines, JSON or Parquet file, or a data set of the hub as OWNER/NAME"
    raise DataError(Problem(path, "there is no such file", fix))


def _parquet_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        fact = f"is no Parquet file: {str(error).splitlines()[0]}"
        raise DataError(Problem(str(file), fact, "correct the file")) from error


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """JSON Lines, or one JSON list; BFCL calls the former `.json`."""
    with file.open(encoding="utf-8-sig") as lines:  # Windows writes a byte order mark
        try:
            is_list = lines.read(1) == "["
            lines.seek(0)
            yield from _listed_rows(file, lines) if is_list else _line_rows(file, lines)
        except UnicodeDecodeError as error:
            fact = f"is no UTF-8 text: {error}"
            raise DataError(Problem(str(file), fact, "save it as UTF-8")) from error


def _listed_rows(file: Path, text: IO[str]) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(_parsed(text.read(), str(file), "correct the file"), 1):
        yield _object(row, f"{file}: row {number}")


def _line_rows(file: Path, lines: IO[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{file}:{number}"
            yield _object(_parsed(line, place, "correct the line"), place)


def _parsed(text: str, place: str, fix: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DataError(Problem(place, "is nested too deeply", fix)) from error
    except ValueError as error:
        raise DataError(Problem(place, f"is no JSON: {error}", fix)) from error


def _object(row: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise DataError(Problem(place, "is no JSON object", "correct the line"))
    return row


def _hub_rows(path: str, subset: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    try:
        found = load_dataset(path, subset, split)
    except (OSError, ValueError, RuntimeError) as error:
        fact = f"can't be read from the hub: {str(error).splitlines()[0]}"
        fix = "download its rows as JSON Lines or Parquet, and name that file"
        raise DataError(Problem(path, fact, fix)) from error
    yield from found


def render_row(
    task: Task,
    row: Mapping[str, Any],
    shots: Sequence[Mapping[str, Any]],
    number: int,
    *,
    chat: bool,
) -> TaskRow:
    """A row as a question, after its examples, and what is right."""
    prompt = render(task.prompt, row, task.name)
    choices = _choices(task, row)
    reference = Reference(
        answers=_answers(task, row, choices),
        choices=choices,
        prompt=prompt,
        tests=render(task.tests, row, task.name),
        truth=row.get(task.truth) if task.truth else None,
    )
    begin = render(task.description, row, task.name)
    examples = [
        (render(task.prompt, shot, task.name), _answers(task, shot, _choices(task, shot))[0])
        for shot in shots
    ]
    context = begin + "".join(
        f"{asked}{task.before_answer}{said}{task.between}" for asked, said in examples
    )
    context += prompt
    if not chat:
        return TaskRow(number, TaskQuestion(text=context), context, reference)
    system = render(task.system, row, task.name) or begin
    messages = [{"role": "system", "content": system}] if system else []
    for asked, said in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": prompt})
    tools = tuple(row.get(task.tools) or ()) if task.tools else ()
    return TaskRow(number, TaskQuestion(messages=tuple(messages), tools=tools), context, reference)


def _choices(task: Task, row: Mapping[str, Any]) -> tuple[str, ...]:
    if not task.choices and isinstance(task.metric, ChoiceMetric):
        fix = "set choices: a list of options, or the name of a field that holds one"
        raise DataError(Problem(task.name, "metric: choice has no options", fix))
    if not isinstance(task.choices, str):
        return tuple(render(each, row, task.name) for each in task.choices)
    found = row.get(task.choices)
    if not isinstance(found, (list, tuple)) or not found:
        fact = f"a row has no list {task.choices!r}"
        raise DataError(Problem(task.name, fact, f"its fields are {', '.join(row)}"))
    return tuple(str(each) for each in found)


def _answers(task: Task, row: Mapping[str, Any], choices: tuple[str, ...]) -> tuple[str, ...]:
    field = _FIELD.fullmatch(task.answer.strip())
    value = row.get(field[1]) if field else None
    known = field is not None and field[1] in row
    if isinstance(task.metric, JsonMetric) and known and not isinstance(value, str):
        return (json.dumps(value),)  # a list is one answer here
    if isinstance(value, (list, tuple)) and value:
        texts = tuple(str(each) for each in value)
    elif isinstance(value, (dict, list)):
        texts = (json.dumps(value),)
    else:
        texts = (render(task.answer, row, task.name) if task.answer else "",)
    return tuple(choices[_option(task, each, choices)] for each in texts) if choices else texts


def _option(task: Task, answer: str, choices: tuple[str, ...]) -> int:
    """Which option is meant by its text, its number or its letter."""
    answer = answer.strip()
    if answer in choices:
        return choices.index(answer)
    if answer.isdecimal() and int(answer) < len(choices):
        return int(answer)
    letter = answer.upper()
    if len(letter) == 1 and 0 <= ord(letter) - ord("A") < len(choices):
        return ord(letter) - ord("A")
    fact = f"the answer {answer!r} is none of the {len(choices)} options"
    raise DataError(Problem(task.name, fact, "give an option's text, number (from 0) or letter"))


def render(template: str, row: Mapping[str, Any], place: str) -> str:
    """A Jinja template over a row's fields; DataError where it names one that isn't there."""
    try:
        text = str(_template(template).render(row))
        text.encode()  # half of a surrogate pair, which JSON can hold, is no text to a tokenizer
        return text
    except Exception as error:  # a template computes whatever its author likes
        fix = f"the row's fields are {', '.join(row)}"
        raise DataError(Problem(place, f"{template!r}: {error}", fix)) from error


@cache
def _template(text: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, finalize=_said
    )
    return environment.from_string(text)


def _said(value: Any) -> Any:
    """What a template writes. Of a null it would write "None", as if a row had said so."""
    if value is None:
        raise ValueError("a value is null; where that is right, write {{ FIELD or '' }}")
    return value
