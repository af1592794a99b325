"""The keys of a job, read off its schema: which sections may stand where, and what is in them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from shardtune.config.job import Job
from shardtune.core.files.yaml_document import KeyPath


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation allows, through tuples, unions and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Annotated, tuple, typing.Union, types.UnionType):
        return [model for part in typing.get_args(annotation) for model in sections_in(part)]
    return []


def sections_at(path: KeyPath) -> list[type[BaseModel]]:
    """The sections that may stand at `path`; several where a `type:` chooses."""
    models: list[type[BaseModel]] = [Job]
    for part in path:
        if isinstance(part, str):
            models = [
                found
                for model in models
                if part in model.model_fields
                for found in sections_in(model.model_fields[part].annotation)
            ]
    return models


def type_of(model: type[BaseModel]) -> str | None:
    """The one `type` that a section has; none where it has no such key, or a choice."""
    field = model.model_fields.get("type")
    words = typing.get_args(field.annotation) if field else ()
    return str(words[0]) if len(words) == 1 else None


def types_at(path: KeyPath) -> set[str]:
    """The words that `type:` may have at `path`."""
    return {word for model in sections_at(path) if (word := type_of(model))}


def words_at(path: KeyPath) -> tuple[str, ...]:
    """The words that a key may have, where it has nothing else."""
    for section in sections_at(path[:-1]):
        field = section.model_fields.get(str(path[-1]))
        if field is not None and typing.get_origin(field.annotation) is typing.Literal:
            return tuple(map(str, typing.get_args(field.annotation)))
    return ()


def all_keys(model: type[BaseModel] = Job, path: KeyPath = ()) -> Iterable[KeyPath]:
    """Every key of a section and of those inside, whatever `type:` may choose."""
    for key, info in model.model_fields.items():
        yield (*path, key)
        for inner in sections_in(info.annotation):
            yield from all_keys(inner, (*path, key))


def override_keys() -> list[str]:
    """Every dotted key that can stand before the sign of a `key=value`, sorted. The first item of a
    list stands for all of them."""
    return sorted(set(_override_keys(Job, "")))


def _override_keys(model: type[BaseModel], prefix: str) -> Iterable[str]:
    for key, info in model.model_fields.items():
        inside = False
        for part in _alternatives(info.annotation):
            item = ".0" if typing.get_origin(part) is tuple else ""
            for each in sections_in(part):
                inside = True
                yield from _override_keys(each, f"{prefix}{key}{item}.")
        if not inside:
            yield f"{prefix}{key}"


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; anything else is the only one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)
