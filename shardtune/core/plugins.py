"""Plug-ins: kinds of sections that installed packages add, found by their entry points."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from shardtune.core.job_section import Section
from shardtune.errors import JobError, Problem

Kind = TypeVar("Kind", bound=Section)


def find_plugins(
    group: str, base: type[Kind], own: Iterable[type[Kind]], called: str
) -> dict[str, type[Kind]]:
    """Our `own` kinds and those of the entry points of a group, by their `type`. JobError names the
    package whose kind can't be used; `called` is the word for what they are."""
    found = {type_word(kind): kind for kind in own}
    for entry in sorted(entry_points(group=group), key=lambda each: each.name):
        kind = _load(entry, group, base)
        if type_word(kind) in found:
            fact = f"{entry.value} calls itself {type_word(kind)!r}, as another {called} does"
            raise JobError(Problem(group, fact, "uninstall one of the two packages"))
        found[type_word(kind)] = kind
    return found


def type_word(kind: type[Section]) -> str:
    """The word that a job writes behind `type:`."""
    return str(kind.model_fields["type"].get_default() or "")


def _load(entry: EntryPoint, group: str, base: type[Kind]) -> type[Kind]:
    package = entry.dist.name if entry.dist is not None else entry.value
    fix = f"update {package}, or uninstall it"
    try:
        kind = entry.load()
    except Exception as error:
        fact = f"{entry.value} can't be imported: {type(error).__name__}: {error}"
        raise JobError(Problem(f"{group} of {package}", fact, fix)) from error
    if not isinstance(kind, type) or not issubclass(kind, base) or not type_word(kind):
        fact = f"{entry.value} is no subclass of {base.__name__} with a `type` of its own"
        raise JobError(Problem(f"{group} of {package}", fact, fix))
    return kind
