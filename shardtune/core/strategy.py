"""The base of every strategy: how a run is parallelized over its ranks, and the engine for it.

A strategy is a section of the job. One folder of `shardtune/parallel/`, or of an installed package
that names it in the entry-point group `shardtune.strategies`, holds all of it: `strategy.py` has
its fields, its layout and its capabilities, `engine.py` the engine. Nothing else in the package
knows its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from shardtune.core.capabilities import Capabilities
from shardtune.core.files.yaml_document import KeyPath
from shardtune.core.job_section import Section
from shardtune.core.layout import Layout
from shardtune.core.lr_schedule import ScheduleKind
from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.send_buckets import SendBuckets
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.world import World
from shardtune.errors import JobError, Problem

if TYPE_CHECKING:
    from shardtune.core.engine import Engine
    from shardtune.core.model.shape import ModelShape


@dataclass(frozen=True)
class Devices:
    """The devices of a run: nodes, and devices in each."""

    nodes: int
    per_node: int
    gpu: bool
    """Whether they have memory of their own, apart from the CPU's."""

    @property
    def count(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Choice:
    """A strategy for the planner to try."""

    kind: str
    """Choices of one kind differ only in their degrees; the best of each kind is shown."""
    name: str
    strategy: StrategyBase
    order: int
    """The simplest first; of two equally good ones the simpler wins: replicas about 0, sharded
    states 10, groups of ranks 20, model parallelism 30, states in CPU memory 40."""
    pages_optimizer: bool = False
    """Whether the GPU is to address optimizer states in host memory: `train.optimizer.paged`."""


@dataclass(frozen=True)
class OverlapSetting:
    """A setting that decides how communication overlaps with compute, as a run has it."""

    key: str
    """Within the section `strategy`."""
    value: str
    meaning: str


@dataclass(frozen=True)
class JobFacts:
    """Values of the job that a strategy's own file may repeat."""

    ranks: int
    global_batch: int
    micro_batch: int
    precision: Precision
    max_grad_norm: float | None
    optimizer: OptimizerSetup
    learning_rate: float
    schedule: ScheduleKind
    warmup_steps: int | None
    steps: int | None
    """Both are None if they depend on the data."""
    hidden_size: int | None = None
    """Width of the model, where it is known."""

    @property
    def accumulation(self) -> int:
        """Gradient accumulation: micro-batches of a step."""
        return math.ceil(self.global_batch / (self.micro_batch * self.ranks))


@dataclass(frozen=True)
class ToldValue:
    """A value of the job that a strategy's own file has, and where it stands there."""

    value: object
    place: str


@dataclass(frozen=True)
class ResolvedStrategy:
    """A strategy whose own file, if it has one, was read, and why each value is what it is."""

    strategy: StrategyBase
    reasons: dict[KeyPath, str] = field(default_factory=dict)
    """By the job's key, such as `train.learning_rate` or `strategy.sharding`."""
    notes: tuple[str, ...] = ()
    """What of the file is left out, and why."""


class StrategyBase(Section, ABC):
    """How a run is parallelized over its ranks."""

    type: str
    planned: ClassVar[bool] = False
    """Whether the planner puts another in its place before anything runs."""

    # What it is -------------------------------------------------------------------------------

    @abstractmethod
    def mesh(self, ranks: int) -> Mesh:
        """The ranks as a grid."""

    @abstractmethod
    def layout(self) -> Layout:
        """What each axis of the mesh shards, and its collectives."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it supports with its present settings."""

    @abstractmethod
    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        """The engine that does what the layout declares."""

    @property
    def holds_whole_model(self) -> bool:
        """Whether every rank has all weights, unsharded."""
        return not any("params" in rule.divides for rule in self.layout().rules)

    def overlap_settings(self) -> tuple[OverlapSetting, ...]:
        """The settings to tune if communication isn't hidden; `shardtune diagnose` shows them."""
        return ()

    def send_buckets(self) -> SendBuckets | None:
        """The communication buffers of fixed size of its engine; None if there are none."""
        return None

    def with_buckets(self, size: float) -> StrategyBase:
        """With communication buffers of about `size` bytes, which keep the links busy, where its
        own fields leave them open."""
        return self

    def written(self) -> str:
        """As a person would write it behind `strategy:`."""
        return _flow({"type": self.type, **self.model_dump(exclude_defaults=True)})

    # What may be wrong with it ----------------------------------------------------------------

    def problems(self, ranks: int) -> list[Problem]:
        """The errors in its own fields on this many ranks of any machine."""
        try:
            self.mesh(ranks).require(ranks)
        except JobError as error:
            return list(error.problems)
        return []

    def problems_here(self, *, gpu: bool, precision: Precision) -> list[Problem]:
        """What it can't do on this machine, in this precision."""
        return []

    # What it knows of `auto` ------------------------------------------------------------------

    def on_nodes(self, nodes: int) -> ResolvedStrategy:
        """With what follows from the number of nodes."""
        return ResolvedStrategy(self)

    def told(self, ranks: int) -> Mapping[KeyPath, ToldValue]:
        """What its own file says of the section `train`, by key, and of `track`: it holds where the
        job says nothing."""
        return {}

    def micro_batch(self, global_batch: int, ranks: int) -> tuple[int, str] | None:
        """The micro-batch that its own file asks for, and the reason; None where it's open."""
        return None

    def precision(self) -> tuple[Precision, str] | None:
        """The precision that its own file asks for, and the reason; None where it's open."""
        return None

    def resolved(self, facts: JobFacts) -> ResolvedStrategy:
        """With what its own file says; JobError where that contradicts the job."""
        return ResolvedStrategy(self)

    # What the planner may try -----------------------------------------------------------------

    @classmethod
    def candidates(cls, shape: ModelShape, devices: Devices) -> Iterable[Choice]:
        """Settings worth trying for a model on these devices."""
        return ()

    @classmethod
    def remedies(cls, devices: Devices) -> Iterable[StrategyBase]:
        """Settings that take less GPU memory than replicas of the model and change nothing else,
        the cheapest first."""
        return ()


def _flow(value: object) -> str:
    """YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(child)}" for key, child in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
