"""A published estimator's table: what states of training take, by its options.

A strategy knows which tool people estimate it with elsewhere, and what that tool would print; the
planner's own figure stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.core.strategy import StrategyBase


@dataclass(frozen=True)
class StatesRow:
    """One line: bytes by the published formula, and the strategy that it speaks of."""

    options: str
    """As the tool writes them."""
    cpu: int
    """Of a node."""
    gpu: int
    """Of one GPU."""
    strategy: StrategyBase
    loads_whole: bool
    """Whether every rank loads the whole model into CPU memory first."""


@dataclass(frozen=True)
class StatesTable:
    """What the tool prints for a model on a machine."""

    title: str
    model: str
    """What it says of the model."""
    rows: tuple[StatesRow, ...]
