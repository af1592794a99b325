"""Models with an encoder and a decoder train as plain transformers trains them.

The reference is transformers itself: each pair alone, without padding, with `labels=`, so that it
shifts the targets and computes the loss; one sum over all target tokens of the step, one division.
Every strategy has to give the same losses and gradient norms.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from pydantic import TypeAdapter

from shardtune.config.job import (
    DataSection,
    LoRA,
    ModelSection,
    NoAdapter,
    TrainSection,
    TrainSource,
)
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Recompute
from shardtune.core.world import World
from shardtune.data.dataset import PreparedData, PreparedSet, SourceReport
from shardtune.data.loader import Loader
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from tests.conformance.table import STRATEGIES
from tests.models import encoder_decoder
from tests.ranks import on_ranks

STEPS, BATCH, RATE, MAX_NORM = 3, 8, 0.1, 0.5
LENGTHS = {"sequence_length": 48, "target_length": 32}
SAME = 1e-5  # relative, fp32
QUICK = (("t5", "none"), ("bart", "lora"))

Steps = list[list[float]]
"""Loss and gradient norm of each step."""


def pairs() -> list[tuple[list[int], list[int]]]:
    """Of uneven lengths: 2 to 47 tokens to read, 1 to 31 to write."""
    draw = np.random.default_rng(5)
    end = [encoder_decoder.END]
    return [
        (
            [*draw.integers(0, 256, int(draw.choice([1, 7, 20, 46]))).tolist(), *end],
            [*draw.integers(0, 256, int(draw.choice([0, 3, 12, 30]))).tolist(), *end],
        )
        for _ in range(40)
    ]


def loader(rank: int, ranks: int, micro_batch: int, global_batch: int = BATCH) -> Loader:
    rows = pairs()
    flags = [[False] * len(source) + [True] * len(target) for source, target in rows]
    dataset = Dataset.from_dict(
        {"input_ids": [source + target for source, target in rows], "trained": flags}
    )
    lengths = np.array([len(each) for each in flags], dtype=np.int32)
    labels = np.array([sum(each) for each in flags], dtype=np.int32)
    report = SourceReport("d", "d", "source_target", 40, 40, *([0] * 9))
    made = PreparedSet("d", 1.0, dataset, lengths, labels, report, paired=True)
    section = DataSection(train=(TrainSource(path="d", format="source_target"),), **LENGTHS)
    return Loader(
        PreparedData((made,), ()),
        section,
        seed=3,
        global_batch=global_batch,
        micro_batch=micro_batch,
        rank=rank,
        ranks=ranks,
        pad_id=encoder_decoder.PAD,
    )


@cache
def folder(family: str) -> str:
    path = tempfile.mkdtemp(prefix="shardtune-encoder-decoder-")
    atexit.register(shutil.rmtree, path)
    encoder_decoder.write(Path(path), family)
    return path


def builder(path: str, adapter: str, recompute: Recompute = "none") -> PretrainedModelBuilder:
    chosen = LoRA(rank=4, alpha=64) if adapter == "lora" else NoAdapter()
    train = TrainSection(precision="fp32", gradient_checkpointing=recompute)
    return PretrainedModelBuilder(ModelFiles(ModelSection(name=path)), chosen, train)


def engine_run(
    world: World, path: str, adapter: str, settings: dict[str, Any], recompute: Recompute = "none"
) -> Steps:
    setup = EngineSetup(
        "fp32",
        OptimizerSetup("sgd"),
        Schedule("constant", RATE, 0, STEPS),
        MAX_NORM,
        0,
        micro_batch=2,
        accumulation=BATCH // (2 * world.size),
    )
    chosen = TypeAdapter(Strategy).validate_python(settings)
    data = loader(world.rank, world.size, 2)
    with chosen.build(builder(path, adapter, recompute), setup, world) as engine:
        results = [engine.step(batches) for batches in data.steps(0, STEPS)]
        return [[result.loss, result.grad_norm] for result in results]


@cache
def reference_run(family: str, adapter: str) -> Steps:
    rows, data = pairs(), loader(0, 1, 1)
    model = builder(folder(family), adapter).whole("cpu").train()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for step in range(STEPS):
        chosen = [rows[int(sample.split(":")[1])] for sample in data.samples(step)]
        count = sum(len(target) for _, target in chosen)
        total = torch.zeros(())
        for source, target in chosen:
            answer = model(input_ids=torch.tensor([source]), labels=torch.tensor([target]))
            total = total + answer.loss * len(target)
        model.zero_grad()
        (total / count).backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in trained)).item()
        with torch.no_grad():
            for parameter in trained:
                parameter -= RATE * min(1.0, MAX_NORM / norm) * parameter.grad
        found.append([total.item() / count, norm])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.long)
        for each in product(("t5", "flan_t5", "mt5", "bart"), ("none", "lora"))
    ],
)
def test_one_process_trains_as_transformers_does(family: str, adapter: str) -> None:
    found = engine_run(World(0, 1, 0), folder(family), adapter, {"type": "ddp"})
    np.testing.assert_allclose(found, reference_run(family, adapter), rtol=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("t5", marks=pytest.mark.long), "bart"])
def test_activation_checkpointing_changes_nothing(family: str) -> None:
    found = engine_run(World(0, 1, 0), folder(family), "none", {"type": "ddp"}, "full")
    np.testing.assert_allclose(found, reference_run(family, "none"), rtol=SAME)


CASES = [
    (name, family, adapter)
    for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    for family, adapter in (("t5", "none"), ("flan_t5", "lora"), ("bart", "none"))
]


def cases_run(world: World, cases: list[tuple[str, str, str, Recompute]]) -> list[Steps]:
    return [
        engine_run(world, path, adapter, STRATEGIES[name][0], recompute)
        for name, path, adapter, recompute in cases
    ]


def test_every_strategy_trains_as_transformers_does() -> None:
    """All of them in one group of ranks."""
    there = importlib.util.find_spec("deepspeed") is not None
    cases = [case for case in CASES if there or not STRATEGIES[case[0]][2]]
    given = [(name, folder(family), adapter, "none") for name, family, adapter in cases]
    for found in on_ranks(2, cases_run, given):
        for case, steps in zip(cases, found, strict=True):
            np.testing.assert_allclose(
                steps, reference_run(*case[1:]), rtol=SAME, err_msg="-".join(case)
            )
