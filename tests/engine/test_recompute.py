"""The fast way through a layer changes no step where ranks share the weights of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.ddp.strategy import DDP
from shardtune.parallel.fsdp.strategy import FSDP
from tests.models.families import write
from tests.parallel.test_pipeline_engine import step
from tests.ranks import on_ranks

SETUP = EngineSetup("fp32", OptimizerSetup("sgd"), Schedule("constant", 0.05, 0, 99), 1.0, 0)
BACKEND = "aot_eager"


def steps(world: World, folder: str, adapter: Adapter, train: dict[str, Any]) -> list[float]:
    compile_layer = nn.Module.compile
    # In a process of its own. What is generated for a CPU isn't the question here.
    setattr(nn.Module, "compile", lambda layer: compile_layer(layer, backend=BACKEND))  # noqa: B010
    section = TrainSection(precision="fp32", **train)
    builder = PretrainedModelBuilder(ModelFiles(ModelSection(name=folder)), adapter, section)
    strategy = FSDP() if world.size > 1 else DDP()
    with strategy.build(builder, SETUP, world) as engine:
        results = [engine.step(step(number)) for number in range(2)]
    return [number for result in results for number in (result.loss, result.grad_norm)]


COMPILED = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    ("adapter", "kernels", "level"),
    [
        (NoAdapter(), "eager", "mlp"),
        (LoRA(rank=4), "eager", "most"),
        *(
            pytest.param(LoRA(rank=4), "compiled", level, marks=COMPILED)
            for level in ("none", "most", "full")
        ),
    ],
)
def test_on_two_ranks_as_on_one(tmp_path: Path, adapter: Adapter, kernels: str, level: str) -> None:
    write(tmp_path, "llama", intermediate_size=96)  # wide enough for `mlp` to drop it
    train = {"kernels": kernels, "gradient_checkpointing": level}
    (expected,) = on_ranks(1, steps, str(tmp_path), adapter, {})
    for found in on_ranks(2, steps, str(tmp_path), adapter, train):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
