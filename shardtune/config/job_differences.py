"""What a job says that the defaults don't: the short form of a resolved job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic_core import PydanticUndefined

from shardtune.config.job import Job
from shardtune.core.files.yaml_document import KeyPath, dotted
from shardtune.core.job_section import Section


@dataclass(frozen=True)
class JobDifference:
    """A value beside its default."""

    key: str
    value: str
    default: str
    """Empty where a job has to say it."""


def differences_from_defaults(job: Job) -> list[JobDifference]:
    """Every value that isn't the default's, in the order of the job."""
    return list(_differences(job, None, ()))


def _differences(section: Section, usual: Section | None, path: KeyPath) -> Iterator[JobDifference]:
    for name, field in type(section).model_fields.items():
        value: object = getattr(section, name)
        default: object = (
            getattr(usual, name) if usual else field.get_default(call_default_factory=True)
        )
        yield from _compared(value, default, (*path, name))


def _compared(value: object, default: object, path: KeyPath) -> Iterator[JobDifference]:
    if isinstance(value, Section):
        same = type(value) is type(default)
        if not same and "type" in type(value).model_fields:
            usual = getattr(default, "type", "")
            yield JobDifference(dotted((*path, "type")), _shown(getattr(value, "type", "")), usual)
        yield from _differences(value, default if same else None, path)  # type: ignore[arg-type]
    elif isinstance(value, tuple) and any(isinstance(each, Section) for each in value):
        for number, each in enumerate(value):
            yield from _compared(each, None, (*path, number))
    elif value != default:
        yield JobDifference(dotted(path), _shown(value), _shown(default))


def _shown(value: object) -> str:
    if value is PydanticUndefined or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
