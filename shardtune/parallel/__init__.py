"""The strategies: one folder each, with its fields, its layout, its capabilities and its engine.

They are found, not listed: every folder here that has a `strategy.py`, and every installed package
that names one in the entry-point group `shardtune.strategies`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import BeforeValidator, Field

from shardtune.core.plugins import find_plugins
from shardtune.core.strategy import StrategyBase
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


STRATEGIES = find_plugins(GROUP, StrategyBase, _own(), "strategy")  # type: ignore[type-abstract]
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
]
