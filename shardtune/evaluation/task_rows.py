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
from typing import Any

from shardtune.errors import DataError, JobError, Problem
from shardtune.evaluation.answer_metrics import ChoiceMetric, JsonMetric, Reference
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
    if isinstance(task.metric, JsonMetric):
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
    found = {row["id"]: row for row in read_rows(task.answers_path, None, "")}
    if missing := [row["id"] for row in rows if row["id"] not in found]:
        fact = f"has no answer to {len(missing)} rows, such as {missing[0]!r}"
        raise DataError(Problem(task.answers_path, fact, "name the file that belongs to the rows"))
    return [{**found[row["id"]], **row} for row in rows]


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
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
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


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """JSON Lines, or one JSON list; BFCL calls the former `.json`."""
    with file.open(encoding="utf-8") as lines:
        text = lines.read(1)
        if text == "[":
            lines.seek(0)
            try:
                rows = json.load(lines)
            except ValueError as error:
                raise DataError(
                    Problem(str(file), f"is no JSON: {error}", "correct the file")
                ) from error
            yield from rows
            return
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                place = f"{file}:{number}"
                raise DataError(
                    Problem(place, f"is no JSON: {error}", "correct the line")
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    Problem(f"{file}:{number}", "is no JSON object", "correct the line")
                )
            yield row


def _hub_rows(path: str, subset: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    import datasets

    try:
        found = datasets.load_dataset(path, subset, split=split)
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
    if isinstance(task.metric, JsonMetric) and value is not None and not isinstance(value, str):
        return (json.dumps(value),)  # a list is one answer here
    if isinstance(value, (list, tuple)) and value:
        return tuple(str(each) for each in value)
    if isinstance(value, (dict, list)):
        return (json.dumps(value),)
    text = render(task.answer, row, task.name) if task.answer else ""
    return (choices[_option(task, text, choices)],) if choices else (text,)


def _option(task: Task, answer: str, choices: tuple[str, ...]) -> int:
    """Which option is meant by its text, its number or its letter."""
    answer = answer.strip()
    if answer in choices:
        return choices.index(answer)
    if answer.isdigit() and int(answer) < len(choices):
        return int(answer)
    if len(answer) == 1 and 0 <= ord(answer.upper()) - ord("A") < len(choices):
        return ord(answer.upper()) - ord("A")
    fact = f"the answer {answer!r} is none of the {len(choices)} options"
    raise DataError(Problem(task.name, fact, "give an option's text, number (from 0) or letter"))


def render(template: str, row: Mapping[str, Any], place: str) -> str:
    """A Jinja template over a row's fields; DataError where it names one that isn't there."""
    import jinja2

    try:
        return str(_template(template).render(row))
    except jinja2.TemplateError as error:
        fix = f"the row's fields are {', '.join(row)}"
        raise DataError(Problem(place, f"{template!r}: {error}", fix)) from error


@cache
def _template(text: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(text)
