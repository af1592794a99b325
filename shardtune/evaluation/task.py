"""A task: rows of a file, how each becomes a question, and the metric that scores the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from shardtune.core.files.yaml_document import read_document
from shardtune.core.job_section import Section
from shardtune.errors import JobError, Problem, did_you_mean
from shardtune.evaluation.answer_metrics import METRICS, Metric
from shardtune.evaluation.respondent import AnswerLimits


class Task(Section):
    """What is asked, and what counts as right. Texts are Jinja templates over a row's fields."""

    name: Annotated[str, Field(min_length=1)]
    path: str = ""
    """A JSON Lines, JSON or Parquet file, or a data set of the hub."""
    answers_path: str = ""
    """Another file whose rows have the same `id`: their fields are added (BFCL keeps its answers
    apart)."""
    subset: str | None = None
    """Of a hub's data set."""
    split: str = "test"
    """Of a hub's data set."""
    prompt: str = "{{prompt}}"
    """The question."""
    answer: str = "{{answer}}"
    """What is right. A field that holds a list gives several right answers."""
    choices: tuple[str, ...] | str = ()
    """Options of `choice`: templates, or the name of a field that holds a list. The answer is then
    an option's number (from 0), its letter, or its text."""
    tests: str = ""
    """Code that fails if the answer of `code` is wrong."""
    truth: str = ""
    """The field with the schema, or the right calls, of `json`."""
    tools: str = ""
    """The field with functions that the chat template is told of."""
    metric: Annotated[Metric, Field(discriminator="type")]
    description: str = ""
    """Stands before everything else."""
    system: str = ""
    """The system message, where the model is asked through its chat template."""
    chat: Literal["auto"] | bool = "auto"
    """Whether questions go through the chat template. `auto`: where there is one, unless options
    are scored or examples are shown."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Examples before each question: the first rows of `shots_path`, the same for all."""
    shots_path: str = ""
    """Where examples come from. Where nothing is said: of a hub's data set, its `shots_split`; of a
    file, its first rows, which are not asked then."""
    shots_split: str = "train"
    """Of a hub's data set."""
    shots_by: str = ""
    """A field: examples are the first rows that have the question's value in it."""
    between: str = "\n\n"
    """Stands between examples."""
    before_answer: str = " "
    """Stands between a question and its answer."""
    max_new_tokens: Annotated[int, Field(gt=0)] = 256
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the model's own stop tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    limit: Annotated[int, Field(gt=0)] | None = None
    """Only the first rows."""

    @property
    def limits(self) -> AnswerLimits:
        return AnswerLimits(self.max_new_tokens, self.stop, self.temperature)

    def with_options(self, options: Mapping[str, Any]) -> Task:
        """The same with what a person said besides; what is None stays."""
        given = {key: value for key, value in options.items() if value is not None}
        return parse_task(self.model_dump() | given, self.name)


def load_tasks(path: Path) -> list[Task]:
    """The tasks of a YAML file: one, or a list of them. Paths in it are relative to it."""
    value = read_document(path).value
    tasks = []
    for number, entry in enumerate(value if isinstance(value, list) else [value], 1):
        place = f"{path}: task {number}" if isinstance(value, list) else str(path)
        if not isinstance(entry, dict):
            raise JobError(Problem(place, "is not a mapping", "a task has `path:` and `metric:`"))
        entry = {"name": path.stem} | entry
        for key in ("path", "shots_path", "answers_path"):
            if isinstance(entry.get(key), str) and (path.parent / entry[key]).is_file():
                entry[key] = str(path.parent / entry[key])
        tasks.append(parse_task(entry, place))
    return tasks


def parse_task(value: Mapping[str, Any], place: str) -> Task:
    """JobError with every mistake at once. A metric may be written as its name alone."""
    value = dict(value)
    if isinstance(value.get("metric"), str):
        value["metric"] = {"type": value["metric"]}
    named = value.get("metric")
    kind = named.get("type") if isinstance(named, Mapping) else None
    if kind is not None and kind not in METRICS:
        near = did_you_mean(str(kind), METRICS)
        fact = f"there is no metric {kind!r}" + (f"; did you mean {near}?" if near else "")
        raise JobError(Problem(place, fact, f"one of {', '.join(METRICS)}"))
    lists = {key: tuple(each) for key, each in value.items() if isinstance(each, list)}
    try:
        return Task.model_validate(value | lists)
    except ValidationError as error:
        problems = []
        for each in error.errors():
            where = ".".join(str(part) for part in each["loc"] if part not in METRICS)
            fix = ""
            if each["type"] == "extra_forbidden":
                near = did_you_mean(str(each["loc"][-1]), Task.model_fields)
                fix = f"did you mean {near}?" if near else "docs/evaluate.md lists what there is"
            fact = {"extra_forbidden": "unknown key", "missing": "is missing"}.get(
                each["type"], each["msg"]
            )
            problems.append(Problem(f"{place}: {where}", fact, fix))
        raise JobError(problems) from error


def require_answerable(
    tasks: Sequence[Task], *, allow_code: bool, by: str = "--allow-code"
) -> None:
    """Refuses code that a model will write, unless a person has asked to run it `by` something."""
    problems = [
        Problem(
            task.name,
            "runs code that the model writes",
            f"if you want that, say {by}; it gets no network, and limits of time and memory",
        )
        for task in tasks
        if task.metric.type == "code" and not allow_code
    ]
    if problems:
        raise JobError(problems)
