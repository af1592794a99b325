"""The declaration of a strategy: what each mesh axis shards, its collectives, where states live.

The trainer derives its settings from it and the planner computes from it, so that a prediction
can't drift away from what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from shardtune.core.mesh import MODEL_AXES, WORLD, Mesh
from shardtune.core.pipeline_schedule import Pipelining

State = Literal["params", "grads", "optim", "activations"]
Cargo = Literal[
    "params", "recalled", "trained", "grads", "unsliced", "tied", "hidden", "embedded", "scores",
    "routed",
]  # fmt: skip
"""What a collective carries, named as in `ModelBytes`: weights, gradients, or activations between
layers."""
Op = Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv", "all_to_all"]
When = Literal["step", "micro_batch"]
Per = Literal["model", "layer", "mixture", "return", "start", "end", "border"]
Home = Literal["gpu", "cpu", "nvme"]
By = Literal["share", "layers", "slices", "experts"]
"""How an axis shards: every tensor evenly, whole layers to pipeline stages, matrices by rows or
columns (tensor parallelism), or a layer's experts, of which each rank has some as a whole."""
Of = Literal["all", "experts", "others"]
"""Which weights a rule covers: all, the experts of a mixture, or all but these."""


@dataclass(frozen=True)
class Move:
    """One collective: what it carries, how often, and the share of the state's bytes it carries."""

    op: Op
    what: Cargo
    when: When
    scale: float = 1.0
    per: Per = "model"
    """How many of them there are: one, one for each layer of the rank, for each with experts, for
    each that returns a gradient, for the embedding or the head if the rank has it, or for each
    border between stages over which the rank sends."""


@dataclass(frozen=True)
class AxisRule:
    """How one axis of the mesh shards the states of training, and which collectives that needs."""

    axis: str
    divides: frozenset[State] = frozenset()
    moves: tuple[Move, ...] = ()
    copies: frozenset[State] = frozenset()
    """States of which a second copy is kept during a step, sharded by this axis alone."""
    by: By = "share"
    of: Of = "all"
    """Whose states it shards and sends."""

    def covers(self, of: Of) -> bool:
        """Whether it applies to these weights."""
        return self.of in ("all", of)


@dataclass(frozen=True)
class Layout:
    """Rules compose: a rank holds the total, divided by the size of every axis that shards it."""

    rules: tuple[AxisRule, ...]
    home: dict[State, Home] = field(default_factory=dict)
    masters: bool = False
    """Whether the optimizer keeps fp32 master weights."""
    pipelining: Pipelining | None = None
    """The pipeline schedule, if an axis shards by layers."""

    def divisor(self, state: State, mesh: Mesh, of: Of = "others") -> int:
        """Over how many ranks `state` is sharded evenly.

        Stages, tensor-parallel shards and experts are uneven: a rank's part of them follows from
        the model's parts.
        """
        even = (
            rule
            for rule in self.rules
            if rule.by == "share" and state in rule.divides and rule.covers(of)
        )
        return math.prod(mesh.size_of(rule.axis) for rule in even)

    def together(self, mesh: Mesh) -> bool:
        """Whether ranks with rows of their own need each other's weights in a forward pass: they
        gather shards, or send tokens to each other's experts."""
        return any(
            "params" in rule.divides and rule.axis not in MODEL_AXES and mesh.size_of(rule.axis) > 1
            for rule in self.rules
        )

    def held(self, state: State, size: int, mesh: Mesh, of: Of = "others") -> int:
        """The bytes of a state that a rank holds: its shard, and its shard of a second copy."""
        copies = [rule.axis for rule in self.rules if state in rule.copies and rule.covers(of)]
        share = size // self.divisor(state, mesh, of)
        return share + sum(size // mesh.size_of(axis) for axis in copies)

    def without_masters(self) -> Layout:
        """The same for a count of optimizer bytes that includes the masters."""
        return replace(self, masters=False)

    def share(self, cargo: Cargo, sending: AxisRule, mesh: Mesh) -> int:
        """Over how many ranks a collective's cargo is sharded already, by axes other than its own.

        Weights are gathered unsharded; of a gradient that one axis has sharded, the next axis
        reduces the shard.
        """
        if cargo not in ("grads", "unsliced", "tied") or sending.axis == WORLD:
            return 1
        before = [
            rule.axis
            for rule in self.rules
            if rule.axis != sending.axis
            and rule.by == "share"
            and "grads" in rule.divides
            and rule.covers(sending.of)
        ]
        return math.prod(mesh.size_of(other) for other in before)

    def sending(self, mesh: Mesh) -> Iterator[tuple[AxisRule, Move]]:
        """The collectives that really run, each with its rule: an axis of one rank sends
        nothing."""
        for rule in self.rules:
            if mesh.size_of(rule.axis) > 1:
                yield from ((rule, move) for move in rule.moves)

    def moves(self, mesh: Mesh) -> tuple[tuple[str, Move], ...]:
        """The same by axis."""
        return tuple((rule.axis, move) for rule, move in self.sending(mesh))
