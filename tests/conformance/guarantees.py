"""What must hold for every row, and how it is measured."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from torch import nn

from shardtune.config.auto import resolve
from shardtune.config.job import Adapter, ModelSection, TrainSection
from shardtune.config.rules import check
from shardtune.core.files.yaml_document import dotted
from shardtune.core.footprint import Held, ModelBytes, predict_held, predict_sent
from shardtune.core.host.machine import Machine
from shardtune.core.layout import Layout
from shardtune.core.lr_schedule import Schedule
from shardtune.core.mesh import Mesh
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.data.loader import Loader
from shardtune.engine.dtensor import size_of
from shardtune.errors import JobError
from shardtune.measure.collective_counter import CollectiveCounter
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.bitsandbytes_linear import NF4Linear
from shardtune.models.quantization.nf4_experts import NF4Experts
from shardtune.parallel import Strategy
from shardtune.parallel.ddp.strategy import DDP
from tests.conformance.slices import routed_part, sliced
from tests.conformance.stages import place_of
from tests.conformance.table import ADAPTERS, LISTENED, MICRO_BATCH, MIXTURES, MODELS, SWAP, Row
from tests.jobs import make_job
from tests.models import encoder_decoder, families
from tests.numerics.test_encoder_decoder import loader as pair_loader
from tests.numerics.test_factorisations import BATCH, loader
from tests.ranks import on_ranks

STEPS = 10
STATES = ("params", "grads", "optim")
SWAPPABLE = 1 << 20
"""Bytes below which DeepSpeed keeps a share in memory."""
TINY = "tiny"


@dataclass(frozen=True)
class Outcome:
    """What a rank saw. Everything in it can be sent between processes."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    weights: dict[str, np.ndarray[Any, Any]]
    held: Held
    sent: dict[str, int]
    sizes: list[tuple[int, bool]]
    """Elements of each weight as it is stored, and whether it is trained; of the reference."""
    shapes: dict[str, tuple[int, ...]]
    """Of all weights, frozen ones too."""
    stored: dict[str, int]
    """Bytes of the same; of the reference."""


@dataclass(frozen=True)
class Finding:
    """A row's figures, for the test and for the printed table."""

    difference: float
    """Largest relative difference of a loss or a gradient norm."""
    weights: float
    """Largest difference of a weight after the last step."""
    held: dict[str, tuple[int, int]]
    """Bytes held and predicted, by state; the rank that exceeds the prediction most."""
    sent: dict[str, tuple[int, int]]
    """Bytes sent and declared, by kind of collective; the rank that is farthest off."""
    swapped: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes in files, held and predicted, by state; none but for rows that swap."""
    missing: list[str] = field(default_factory=list)
    """Trained weights that the row has not, or has empty or in another shape."""
    left: list[str] = field(default_factory=list)
    """Files that are left behind."""


def builder(model: str, adapter: str) -> PretrainedModelBuilder:
    settings, quantization = ADAPTERS[adapter]
    chosen = TypeAdapter(Adapter).validate_json(json.dumps(settings))
    section = ModelSection(name=model, quantization=quantization)
    return PretrainedModelBuilder(ModelFiles(section), chosen, TrainSection(precision="fp32"))


@cache
def swappable() -> str:
    """A model whose MLP is so wide that DeepSpeed swaps half of each of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    folder = tempfile.mkdtemp(prefix="shardtune-swappable-")
    atexit.register(shutil.rmtree, folder)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def strategy_of(row: Row, swap: str = SWAP) -> Strategy:
    text = json.dumps(row.settings).replace(json.dumps(SWAP), json.dumps(swap))
    return TypeAdapter(Strategy).validate_json(text)


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


def run(world: World, chosen: Strategy, model: str, adapter: str) -> Outcome:
    """Ten steps on this rank."""
    mesh = chosen.mesh(world.size)
    rank, ranks = mesh.data_rank(world.rank), mesh.data_ranks
    paired = ModelFiles(ModelSection(name=model)).kind == "encoder_decoder"
    data = pair_loader(rank, ranks, MICRO_BATCH, BATCH) if paired else whole_rows(rank, ranks)
    probe = CollectiveCounter()
    with chosen.build(builder(model, adapter), setup(mesh.data_ranks), world) as engine:
        sizes = [(each.numel(), each.requires_grad) for each in engine.module().parameters()]
        results = []
        for step, given in enumerate(data.steps(0, STEPS)):
            if step == LISTENED:
                with probe:
                    results.append(engine.step(given))
            else:
                results.append(engine.step(given))
        held = engine.held()
        weights = {name: w.float().cpu().numpy() for name, w in engine.trained_weights()}
        evaluation = engine.evaluate("d", next(data.steps(0, 1))).loss
        weights_of = dict(engine.module().named_parameters())
        shapes = {name: tuple(weight.shape) for name, weight in weights_of.items()}
        shapes |= packed_shapes(engine.module())
        stored = {name: size_of(weight) for name, weight in weights_of.items()}
    losses, norms = zip(*((result.loss, result.grad_norm) for result in results), strict=True)
    return Outcome(
        losses=list(losses),
        norms=list(norms),
        evaluation=evaluation,
        weights=weights,
        held=held,
        sent=dict(probe.bytes),
        sizes=sizes,
        shapes=shapes,
        stored=stored,
    )


def packed_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of weights in NF4, which are rows of bytes, as they were before: layers are divided among
    stages by what they compute."""
    found = {}
    for name, module in model.named_modules():
        states = {"weight": module.state} if isinstance(module, NF4Linear) else {}
        states |= module.states if isinstance(module, NF4Experts) else {}
        there = {weight: state for weight, state in states.items() if state is not None}
        found |= {f"{name}.{weight}": tuple(state.shape) for weight, state in there.items()}
    return found


def whole_rows(rank: int, ranks: int) -> Loader:
    return loader(True, rank, ranks, MICRO_BATCH)


@cache
def reference(model: str, adapter: str) -> Outcome:
    """The same ten steps in one process, with nothing spread."""
    return on_ranks(1, run, DDP(), model, adapter)[0]


def refusal(row: Row) -> str:
    """What is told of a job with the row's settings on a machine without a GPU."""
    adapter, quantization = ADAPTERS[row.adapter]
    job = make_job(
        model={"name": TINY, "quantization": quantization},
        adapter=adapter,
        strategy=row.settings,
        launch={"processes": row.ranks},
    )
    machine = Machine(cores=2, gpus=0)
    try:
        check(resolve(job, machine).job, dotted, machine)
    except JobError as error:
        return "; ".join(problem.fact for problem in error.problems)
    return ""


@cache
def folder(model: str) -> str:
    """What a job would call the model."""
    if model == TINY:
        return model
    path = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, path)
    if model in MODELS:
        families.write(Path(path), "llama", **MODELS[model])
    elif model in MIXTURES:
        families.write(Path(path), model, **MIXTURES[model])
    else:
        encoder_decoder.write(Path(path), model)
    return path


def examine(row: Row) -> Finding:
    """Runs the row on real ranks and holds it against the reference and against its layout."""
    model = swappable() if row.build else folder(row.model)
    expected = reference(model, row.adapter)
    with tempfile.TemporaryDirectory() as swap:
        chosen = strategy_of(row, swap)
        outcomes: list[Outcome] = on_ranks(row.ranks, run, chosen, model, row.adapter)
        left = [str(path) for path in Path(swap).rglob("*")]
    mesh, layout = chosen.mesh(row.ranks), chosen.layout()
    parts = [part_of(expected, layout, mesh, rank) for rank in range(row.ranks)]
    predicted = [predict_held(layout, mesh, part) for part in parts]
    count = microbatches(mesh.data_ranks)
    declared = [predict_sent(layout, mesh, part, microbatches=count) for part in parts]
    kinds = {kind for one in (*(o.sent for o in outcomes), *declared) for kind in one}
    first = outcomes[0]
    return Finding(
        difference=max(_apart(outcome, expected) for outcome in outcomes),
        weights=max(
            float(np.abs(first.weights[name] - weight).max())
            for name, weight in expected.weights.items()
            if name in first.weights
        ),
        held={
            state: max(
                ((o.held.of(state), p.of(state)) for o, p in zip(outcomes, predicted, strict=True)),
                key=lambda pair: pair[0] - pair[1],
            )
            for state in STATES
        },
        swapped=_in_files(outcomes, expected) if row.build else {},
        left=left,
        sent={
            kind: max(
                (
                    (o.sent.get(kind, 0), d.get(kind, 0))
                    for o, d in zip(outcomes, declared, strict=True)
                ),
                key=lambda pair: abs(pair[0] - pair[1]),
            )
            for kind in sorted(kinds)
        },
        missing=[
            name
            for name, weight in expected.weights.items()
            if name not in first.weights or first.weights[name].shape != weight.shape
        ],
    )


def _in_files(outcomes: list[Outcome], expected: Outcome) -> dict[str, tuple[int, int]]:
    """Bytes in files beside those of the shares that are large enough. Weights are swapped one by
    one; masters and momentum of all trained weights of a kind together."""
    shares = [(4 * size // len(outcomes), trained) for size, trained in expected.sizes]
    together = sum(share for share, trained in shares if trained)
    predicted = {
        "params": sum(share for share, _ in shares if share >= SWAPPABLE),
        "optim": 2 * together if together >= SWAPPABLE else 0,
    }
    return {
        state: (max(o.held.bytes.get((state, "nvme"), 0) for o in outcomes), size)
        for state, size in predicted.items()
    }


def part_of(expected: Outcome, layout: Layout, mesh: Mesh, rank: int) -> ModelBytes:
    """The bytes of the part of the model that a rank works on, and of what flows through it."""
    if mesh.size_of("expert") > 1:
        trained = set(expected.weights)
        return routed_part(expected.stored, expected.shapes, trained, mesh, rank)
    if not {"tensor", "pipeline"} & dict(mesh.axes).keys():
        size = sum(weight.nbytes for weight in expected.weights.values())
        params, grads, optim = (expected.held.of(state) for state in STATES)
        return ModelBytes(params, size, grads, optim)
    place = place_of(expected.shapes, set(expected.weights), layout, mesh, rank)
    return sliced(expected.stored, expected.shapes, set(expected.weights), mesh, place, rank)


def _apart(outcome: Outcome, expected: Outcome) -> float:
    ours = np.array([*outcome.losses, *outcome.norms, outcome.evaluation])
    theirs = np.array([*expected.losses, *expected.norms, expected.evaluation])
    return float(np.abs(ours / theirs - 1).max())
