"""Options of `estimate` that print a published estimator's tables, with our figures beside them.

A strategy that people estimate with a tool of its own says so in `states_option.json` of its
folder: data, so that `--help` shows the option and imports no strategy.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardtune.core.model.shape import ModelShape
    from shardtune.core.states_table import StatesTable
    from shardtune.plan.cluster import Cluster

COUNTS = re.compile(
    r"(?P<total>\d+(?:\.\d+)?)(?P<unit>[MB])(?:,(?P<largest>\d+(?:\.\d+)?)(?P<of>[MB]))?"
)
UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class StatesOption:
    """An option as a strategy declares it."""

    command: str
    flag: str
    metavar: str
    help: str
    tables: str
    """The module that has `states_tables`."""

    @property
    def key(self) -> str:
        """Under which argparse keeps its value."""
        return self.flag.lstrip("-").replace("-", "_")


def states_options() -> Iterator[StatesOption]:
    """Every option that a strategy declares."""
    strategies = Path(__file__).parents[1] / "parallel"
    for file in sorted(strategies.glob("*/states_option.json")):
        yield StatesOption(**json.loads(file.read_text("utf-8")))


def add_states_options(command: argparse.ArgumentParser, name: str) -> None:
    for option in states_options():
        if option.command == name:
            command.add_argument(option.flag, metavar=option.metavar, help=option.help)


def asked_tables(arguments: argparse.Namespace) -> StatesOption | None:
    """The option that was given."""
    return next((o for o in states_options() if getattr(arguments, o.key, None)), None)


def print_states_tables(option: StatesOption, model: str, cluster: Cluster) -> None:
    """For a model by its name or folder, or for counts as `13B,164M`, of which nothing more is
    known than DeepSpeed's formulas ask for."""
    from rich.console import Console

    from shardtune.plan.deepspeed_estimators import our_states
    from shardtune.report.states_table_view import print_table

    shape, parameters, largest = _counted(option, model)
    tables: tuple[StatesTable, ...] = import_module(option.tables).states_tables(
        parameters, largest, cluster.devices
    )
    for table in tables:
        ours = [our_states(row, shape, model, cluster) if shape else None for row in table.rows]
        print_table(table, ours, cluster, Console())


def _counted(option: StatesOption, model: str) -> tuple[ModelShape | None, int, int]:
    """The model's shape where there is one, all its parameters and those of its largest module."""
    from shardtune.config.job import ModelSection
    from shardtune.config.model_config import shape_of
    from shardtune.errors import JobError, Problem

    counts = COUNTS.fullmatch(model)
    if counts is None:
        shape = shape_of(ModelSection(name=model))
        return shape, shape.parameters, shape.largest_module
    if counts["largest"] is None:
        fact = "of a model that is only counted the largest layer must be known, too"
        raise JobError(Problem(option.flag, fact, f"write {model},LARGEST, as 13B,164M"))
    total, largest = (
        round(float(counts[number]) * UNITS[counts[unit]])
        for number, unit in (("total", "unit"), ("largest", "of"))
    )
    return None, total, largest
