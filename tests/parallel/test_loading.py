"""No rank ever holds the whole model, from the first file that is opened to the finished engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.engine.dtensor import local
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from tests.highest import highest_rise, rounding
from tests.models.families import write
from tests.ranks import on_ranks

MIB = 1 << 20
LAYERS, LAYER = 24, 8.2 * MIB
CONSTANT = 28 * MIB  # the engine's own buffers and Python objects
HOOKS = {"fsdp": 0, "deepspeed": 24 << 10, "pipeline": 0}
"""And for each module: DeepSpeed makes two classes of autograd functions for every single one."""
FSDP, ZERO3 = {"type": "fsdp"}, {"type": "deepspeed", "zero_optimization": {"stage": 3}}
CASES: dict[str, tuple[dict[str, Any], Adapter]] = {
    "fsdp-lora": (FSDP, LoRA(rank=4, targets=("q_proj", "v_proj"))),
    "fsdp-full": (FSDP, NoAdapter()),
    "zero3-lora": (ZERO3, LoRA(rank=4, targets=("q_proj", "v_proj"))),
    "zero3-full": (ZERO3, NoAdapter()),
    "pipeline-full": ({"type": "pipeline", "stages": 4}, NoAdapter()),
}
LONG = {"fsdp-full", "zero3-full", "zero3-lora"}
"""Loaded as with an adapter; DeepSpeed's share is measured on two ranks in test_sharded.py."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """197 MiB in 24 layers, and a small model of the same family to pay for imports with."""
    large, small = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("small")
    shape = {"hidden_size": 512, "intermediate_size": 704, "num_key_value_heads": 4}
    write(large, "llama", num_hidden_layers=LAYERS, shard="50MB", **shape)
    write(small, "llama", num_hidden_layers=4)  # a layer for each of four stages
    return str(large), str(small)


def rise(world: World, case: str, large: str, small: str) -> tuple[int, int, int]:
    """How far memory rises above where it was while the engine is built; the share that it holds,
    of the weights alone and of everything."""
    settings, adapter = CASES[case]
    chosen = TypeAdapter(Strategy).validate_json(json.dumps(settings))
    setup = EngineSetup("fp32", OptimizerSetup("sgd"), Schedule("constant", 0.1, 0, 9), None, 0)

    def build(folder: str) -> Any:
        plan = PretrainedModelBuilder(
            ModelFiles(ModelSection(name=folder)), adapter, TrainSection(precision="fp32")
        )
        return chosen.build(plan, setup, world)

    with build(small):
        pass
    with highest_rise() as rise:
        made = build(large)
    with made as engine:
        held, module = engine.held(), engine.module()
        modules = sum(1 for _ in module.modules())
        shares = [getattr(each, "ds_tensor", local(each.detach())) for each in module.parameters()]
        # DeepSpeed makes masters (here also fp32) and room for as many gradients at once.
        params, others = held.of("params"), 2 * held.of("optim")
        risen = rise.bytes - modules * HOOKS[settings["type"]] - rounding(shares)
        return risen, params, params + others


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long if case in LONG else ()) for case in CASES],
)
def test_peak_of_loading_on_four_ranks(case: str, folders: tuple[str, str]) -> None:
    if case.startswith("zero3"):
        pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
    for risen, params, held in on_ranks(4, rise, case, *folders):
        assert params < LAYERS * LAYER / 4 + 4 * MIB  # adapters, embedding, head
        most = held + 2 * LAYER + CONSTANT
        # A second copy of the share, for a moment, would not go unnoticed.
        assert risen < most, f"{risen / MIB:.0f} > {most / MIB:.0f}, holds {held / MIB:.0f} MiB"
        assert params > CONSTANT
