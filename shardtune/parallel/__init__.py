"""The strategies: one folder each, with its fields, its layout, its capabilities and its engine.

They are found, not listed: every folder here that has a `strategy.py`, and every installed package
that names one in the entry-point group `shardtune.strategies`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import BeforeValidator, Field

from shardtune.core.strategy import StrategyBase
from shardtune.errors import JobError, Problem
from shardtune.parallel.auto.strategy import OrShort, spelt_out
from shardtune.parallel.ddp.strategy import DDP

GROUP = "shardtune.strategies"
"""The entry points of other packages."""


def _own() -> Iterator[type[StrategyBase]]:
    """Of each folder here the strategy that its `strategy.py` defines."""
    for folder in pkgutil.iter_modules(__path__, f"{__name__}."):
        if folder.ispkg and find_spec(f"{folder.name}.strategy"):
            module = import_module(f"{folder.name}.strategy")
            yield from (
                kind
                for kind in vars(module).values()
                if isinstance(kind, type)
                and issubclass(kind, StrategyBase)
                and kind.__module__ == module.__name__
            )


def _loaded(entry: EntryPoint) -> type[StrategyBase]:
    """The strategy of another package, or JobError with its name."""
    package = entry.dist.name if entry.dist is not None else entry.value
    fix = f"update {package}, or uninstall it"
    try:
        kind = entry.load()
    except Exception as error:
        fact = f"{entry.value} can't be imported: {type(error).__name__}: {error}"
        raise JobError(Problem(f"{GROUP} of {package}", fact, fix)) from error
    if not isinstance(kind, type) or not issubclass(kind, StrategyBase) or not type_of(kind):
        fact = f"{entry.value} is no subclass of StrategyBase with a `type` of its own"
        raise JobError(Problem(f"{GROUP} of {package}", fact, fix))
    return kind


def type_of(kind: type[StrategyBase]) -> str:
    """The word that a job writes for it."""
    return str(kind.model_fields["type"].get_default() or "")


def _found() -> dict[str, type[StrategyBase]]:
    found = {type_of(kind): kind for kind in _own()}
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        kind = _loaded(entry)
        if type_of(kind) in found:
            fact = f"{entry.value} calls itself {type_of(kind)!r}, as another strategy does"
            raise JobError(Problem(GROUP, fact, "uninstall one of the two packages"))
        found[type_of(kind)] = kind
    return found


STRATEGIES = _found()
"""Every strategy that a job can name, by its `type`."""
DEFAULT: StrategyBase = DDP()
"""Of a job that names none."""

if TYPE_CHECKING:
    Strategy = StrategyBase
else:
    Strategy = Annotated[
        Union[tuple(STRATEGIES.values())],  # noqa: UP007 - they are counted at run time
        BeforeValidator(spelt_out),
        Field(discriminator="type"),
        OrShort(),
    ]


def strategies_that(can: Callable[[StrategyBase], object]) -> list[StrategyBase]:
    """Those that can do something as they are without settings, for a fix to name."""
    return [each for each in _without_settings() if can(each)]


def packages_needed() -> list[str]:
    """What has to be installed for one strategy or another."""
    return sorted({n.package for each in _without_settings() for n in each.capabilities.needs})


def _without_settings() -> Iterator[StrategyBase]:
    for kind in STRATEGIES.values():
        required = any(field.is_required() for field in kind.model_fields.values())
        if not kind.planned and not required:
            yield kind.model_validate({})


__all__ = [
    "DEFAULT",
    "STRATEGIES",
    "Strategy",
    "StrategyBase",
    "packages_needed",
    "spelt_out",
    "strategies_that",
    "type_of",
]
