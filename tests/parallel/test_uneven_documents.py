"""Packed documents in layers that carry a state: each rank has as many as its rows hold.

Such a layer computes once for each length of documents, so ranks compute it unequally often. The
strategies that gather weights have to gather them equally often even so. The reference is one
process that has the rows of both ranks.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from shardtune.training.engine_setup import make_plan
from tests.models.family_runs import ADAPTERS, family_job, write_family
from tests.ranks import on_ranks

LENGTH, STEPS = 24, 3
SAME = 2e-5
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"type": "ddp"},
    "fsdp": {"type": "fsdp"},
    "zero3": {"type": "deepspeed", "zero_optimization": {"stage": 3}},
}
DOCUMENTS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((3, 5, 2, 13, 1), (24,)),
    ((24,), (9, 7, 8)),
    ((1, 2, 4, 8, 9), (12, 12)),
)
"""Of each step the lengths of the documents that each rank has: as many, and as many kinds, as the
other has not."""

Case = tuple[str, str, str]
"""What is trained, the strategy, and the level of activation checkpointing."""
Curve = list[float]


def row(step: int, rank: int) -> MicroBatch:
    """The packed row that a rank has in a step."""
    lengths = DOCUMENTS[step][rank]
    draw = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, 67, (1, LENGTH), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = IGNORED
    targets[:, :-1][positions[:, 1:] == 0] = IGNORED
    return MicroBatch(ids, positions, targets, (), LENGTH, int((targets != IGNORED).sum()))


def curves(world: World, folder: Path, family: str, cases: list[Case]) -> dict[Case, Curve]:
    """Losses and norms of the gradient of all steps, in each case."""
    found = {}
    for adapter, strategy, level in cases:
        job = family_job(folder, family, adapter, "ddp", world.size)
        chosen = TypeAdapter(Strategy).validate_python(STRATEGIES[strategy])
        train = job.train.model_copy(update={"gradient_checkpointing": level})
        job = job.model_copy(update={"strategy": chosen, "train": train})
        plan = make_plan(job, world.size, STEPS)
        builder = PretrainedModelBuilder(ModelFiles(job.model), job.adapter, job.train)
        ranks = range(2) if world.size == 1 else (world.rank,)
        with plan.strategy.build(builder, plan.setup, world) as engine:
            results = [engine.step([row(step, rank) for rank in ranks]) for step in range(STEPS)]
        found[adapter, strategy, level] = [
            figure for each in results for figure in (each.loss, each.grad_norm)
        ]
    return found


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_unequally_many_documents(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    alone = curves(World(), tmp_path, family, [(each, "ddp", "none") for each in ADAPTERS])
    strategies = [name for name in STRATEGIES if name != "zero3" or find_spec("deepspeed")]
    cases = [(adapter, strategy, "none") for adapter in ADAPTERS for strategy in strategies]
    cases += [("lora", strategy, "full") for strategy in strategies]
    for found in on_ranks(2, curves, tmp_path, family, cases):
        for case in cases:
            expected = alone[case[0], "ddp", "none"]
            assert found[case] == pytest.approx(expected, rel=SAME), case
