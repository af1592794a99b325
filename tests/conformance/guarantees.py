"""What must hold for every row, and how it is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from shardtune.core.footprint import Held, ModelBytes, predict_held, predict_sent
from shardtune.core.schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.job import Adapter, ModelSection, TrainSection
from shardtune.measure.probe import CollectiveProbe
from shardtune.models.blueprint import ModelBlueprint
from shardtune.strategies import DDP, Strategy
from tests.conformance.table import ADAPTERS, Row
from tests.numerics.test_factorisations import BATCH, loader
from tests.ranks import on_ranks

STEPS = 10
LISTENED = 3  # the step in which collectives are counted
MICRO_BATCH = 2
STATES = ("params", "grads", "optim")


@dataclass(frozen=True)
class Outcome:
    """What a rank saw. Everything in it can be sent between processes."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    weights: dict[str, np.ndarray[Any, Any]]
    held: Held
    sent: dict[str, int]


@dataclass(frozen=True)
class Finding:
    """A row's figures, for the test and for the printed table."""

    difference: float
    """Largest relative difference of a loss or a gradient norm."""
    weights: float
    """Largest difference of a weight after the last step."""
    held: dict[str, tuple[int, int]]
    """Bytes held and predicted, by state; the fullest rank."""
    sent: dict[str, tuple[int, int]]
    """Bytes sent and declared, by kind of collective."""
    missing: list[str] = field(default_factory=list)
    """Trained weights that the row has not, or has empty or in another shape."""


def blueprint(adapter: str) -> ModelBlueprint:
    settings, quantization = ADAPTERS[adapter]
    chosen = TypeAdapter(Adapter).validate_json(json.dumps(settings))
    section = ModelSection(name="tiny", quantization=quantization)
    return ModelBlueprint(section, chosen, TrainSection(precision="fp32"))


def strategy_of(row: Row) -> Strategy:
    return TypeAdapter(Strategy).validate_json(json.dumps(row.settings))


def microbatches(ranks: int) -> int:
    return -(-BATCH // (ranks * MICRO_BATCH))


def setup(ranks: int) -> EngineSetup:
    """SGD shows an error of scale that AdamW would hide; momentum gives it a state to divide."""
    return EngineSetup(
        precision="fp32",
        optimizer=OptimizerSetup("sgd", momentum=0.9),
        schedule=Schedule("cosine", 0.2, 2, STEPS),
        max_grad_norm=0.4,  # below many of the norms that occur, so that clipping is compared too
        seed=0,
        micro_batch=MICRO_BATCH,
        accumulation=microbatches(ranks),
    )


def run(world: World, row: Row | None, adapter: str) -> Outcome:
    """Ten steps of the row on this rank, or of one process with nothing spread if it is None."""
    chosen: Strategy = strategy_of(row) if row else DDP()
    data = loader(True, world.rank, world.size, MICRO_BATCH)
    probe = CollectiveProbe()
    with chosen.build(blueprint(adapter), setup(world.size), world) as engine:
        results = []
        for step, given in enumerate(data.steps(0, STEPS)):
            if step == LISTENED:
                with probe:
                    results.append(engine.step(given))
            else:
                results.append(engine.step(given))
        held = engine.held()
        weights = {name: w.float().cpu().numpy() for name, w in engine.trained_weights().items()}
        evaluation = engine.evaluate("d", next(data.steps(0, 1))).loss
    losses, norms = zip(*((result.loss, result.grad_norm) for result in results), strict=True)
    return Outcome(list(losses), list(norms), evaluation, weights, held, dict(probe.bytes))


@cache
def reference(adapter: str) -> Outcome:
    """The same ten steps in one process."""
    return on_ranks(1, run, None, adapter)[0]


def examine(row: Row) -> Finding:
    """Runs the row on real ranks and holds it against the reference and against its layout."""
    expected = reference(row.adapter)
    outcomes: list[Outcome] = on_ranks(row.ranks, run, row, row.adapter)
    chosen = strategy_of(row)
    mesh, layout = chosen.mesh(row.ranks), chosen.layout()
    trained = sum(weight.nbytes for weight in expected.weights.values())
    params, grads, optim = (expected.held.of(state) for state in STATES)
    whole = ModelBytes(params, trained, grads, optim)
    predicted = predict_held(layout, mesh, whole)
    declared = predict_sent(layout, mesh, whole, microbatches=microbatches(row.ranks))
    first = outcomes[0]
    return Finding(
        difference=max(_apart(outcome, expected) for outcome in outcomes),
        weights=max(
            float(np.abs(first.weights[name] - weight).max())
            for name, weight in expected.weights.items()
            if name in first.weights
        ),
        held={
            state: (max(o.held.of(state) for o in outcomes), predicted.of(state))
            for state in STATES
        },
        sent={
            kind: (first.sent.get(kind, 0), declared.get(kind, 0))
            for kind in sorted({*first.sent, *declared})
        },
        missing=[
            name
            for name, weight in expected.weights.items()
            if name not in first.weights or first.weights[name].shape != weight.shape
        ],
    )


def _apart(outcome: Outcome, expected: Outcome) -> float:
    ours = np.array([*outcome.losses, *outcome.norms, outcome.evaluation])
    theirs = np.array([*expected.losses, *expected.norms, expected.evaluation])
    return float(np.abs(ours / theirs - 1).max())
