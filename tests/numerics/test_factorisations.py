"""The same global batch, cut in every way, gives the same loss and gradient.

The reference is plain PyTorch: each document by itself, one sum over all labels of the step, one
division. Nothing of it is shared with the engine under test.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn import functional

from shardtune.config.job import (
    DataSection,
    LoRA,
    ModelSection,
    NoAdapter,
    TrainSection,
    TrainSource,
)
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.data.dataset import PreparedData, PreparedSet, SourceReport
from shardtune.data.loader import Loader
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.ddp.engine import native_engine
from tests.ranks import on_ranks

STEPS = 5
BATCH = 12
LENGTH = 96
MAX_NORM = 0.5  # below the norms that occur, so that clipping is part of what is compared

FACTORISATIONS = [  # ranks, rows of a micro-batch
    (1, 12),
    (1, 4),
    (1, 1),
    (2, 6),
    (2, 2),
    (2, 1),
    (3, 4),
    (3, 2),
    (4, 3),
    (4, 1),
    (5, 1),  # doesn't divide: some ranks get micro-batches of padding only
]


def documents() -> list[tuple[list[int], list[bool]]]:
    """Very uneven: 4 to 90 tokens, one label to nearly all, and every fifth with none at all."""
    draw = np.random.default_rng(7)
    found = []
    for index in range(64):
        length = int(draw.choice([4, 9, 30, 90]))
        ids = draw.integers(0, 256, length).tolist()
        labels = 0 if index % 5 == 0 else int(draw.choice([1, 2, length - 1]))
        found.append((ids, [False] * (length - labels) + [True] * labels))
    return found


def prepared() -> PreparedData:
    rows = documents()
    dataset = Dataset.from_dict(
        {"input_ids": [ids for ids, _ in rows], "trained": [flags for _, flags in rows]}
    )
    lengths = np.array([len(ids) for ids, _ in rows], dtype=np.int32)
    labels = np.array([sum(flags) for _, flags in rows], dtype=np.int32)
    report = SourceReport("d", "d", "pretokenized", 64, 64, *([0] * 9))
    return PreparedData((PreparedSet("d", 1.0, dataset, lengths, labels, report),), ())


def loader(packing: bool, rank: int, ranks: int, micro_batch: int) -> Loader:
    section = DataSection(
        train=(TrainSource(path="d", format="pretokenized"),),
        sequence_length=LENGTH,
        packing=packing,
    )
    return Loader(
        prepared(),
        section,
        seed=3,
        global_batch=BATCH,
        micro_batch=micro_batch,
        rank=rank,
        ranks=ranks,
        pad_id=0,
    )


def fresh_model(adapter: str) -> torch.nn.Module:
    chosen = LoRA(rank=4) if adapter == "lora" else NoAdapter()
    train = TrainSection(precision="fp32")
    model = PretrainedModelBuilder(ModelFiles(ModelSection(name="tiny")), chosen, train).whole(
        "cpu"
    )
    if adapter == "lora":  # B starts at zero, which would hide errors in A's gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(
                    parameter, std=0.05, generator=torch.Generator().manual_seed(len(name))
                )
    return model


def engine_run(world: World, adapter: str, packing: bool, micro_batch: int) -> list[list[float]]:
    """Loss and gradient norm of each step, as the engine reports them on this rank."""
    setup = EngineSetup(
        "fp32", OptimizerSetup("sgd"), Schedule("constant", 0.5, 0, STEPS), MAX_NORM, 0
    )
    data = loader(packing, world.rank, world.size, micro_batch)
    with native_engine(fresh_model(adapter), setup, world) as engine:
        results = [engine.step(batches) for batches in data.steps(0, STEPS)]
    return [[result.loss, result.grad_norm] for result in results]


@cache
def reference_run(adapter: str, packing: bool) -> list[list[float]]:
    rows, data = documents(), loader(packing, 0, 1, 1)
    model = fresh_model(adapter).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for step in range(STEPS):
        chosen = [rows[int(sample.split(":")[1])] for sample in data.samples(step)]
        count = sum(sum(flags) for _, flags in chosen)
        total = torch.zeros(())
        for ids, flags in chosen:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            keep = torch.tensor(flags[1:])
            losses = functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
            total = total + losses[keep].sum()
        model.zero_grad()
        (total / count).backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in trained)).item()
        with torch.no_grad():
            for parameter in trained:
                parameter -= 0.5 * min(1.0, MAX_NORM / norm) * parameter.grad
        found.append([total.item() / count, norm])
    return found


def near(found: list[list[float]], expected: list[list[float]]) -> None:
    """The norm is a sum in fp32 over all weights, which an ARM CPU rounds otherwise."""
    losses, norms = np.transpose(found)
    right, lengths = np.transpose(expected)
    np.testing.assert_allclose(losses, right, rtol=1e-6)
    np.testing.assert_allclose(norms, lengths, rtol=2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "micro_batch"), FACTORISATIONS)
@pytest.mark.parametrize("packing", [False, True], ids=["single", "packed"])
def test_every_factorisation_equals_the_full_batch(
    ranks: int, micro_batch: int, packing: bool
) -> None:
    expected = reference_run("none", packing)
    for found in on_ranks(ranks, engine_run, "none", packing, micro_batch):
        near(found, expected)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 3), (2, 2), (3, 4)])
def test_lora_too(ranks: int, micro_batch: int) -> None:
    expected = reference_run("lora", True)
    for found in on_ranks(ranks, engine_run, "lora", True, micro_batch):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_data_is_as_uneven_as_it_claims() -> None:
    batches = [batch for step in loader(False, 0, 1, 1).steps(0, STEPS) for batch in step]
    assert min(batch.labels for batch in batches) == 0
    assert max(batch.labels for batch in batches) > 50
