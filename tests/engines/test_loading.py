"""No rank ever holds the whole model, from the first file that is opened to the finished engine."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from shardtune.core.schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.job import LoRA, ModelSection, TrainSection
from shardtune.models.blueprint import ModelBlueprint
from shardtune.strategies import Strategy
from tests.models.families import write
from tests.ranks import on_ranks

MIB = 1 << 20
LAYERS, LAYER = 24, 8.2 * MIB
CONSTANT = 24 * MIB  # the engine's own buffers, hooks and Python objects
SHARES = {"fsdp": 1, "zero3": 2, "pipeline": 1}
"""Times its share that a rank holds at most: DeepSpeed copies it into one piece when it starts."""
STRATEGIES = {
    "fsdp": {"type": "fsdp"},
    "zero3": {"type": "deepspeed", "zero_optimization": {"stage": 3}},
    "pipeline": {"type": "pipeline", "stages": 4},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """197 MiB in 24 layers, and a small model of the same family to pay for imports with."""
    large, small = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("small")
    shape = {"hidden_size": 512, "intermediate_size": 704, "num_key_value_heads": 4}
    write(large, "llama", num_hidden_layers=LAYERS, shard="50MB", **shape)
    write(small, "llama", num_hidden_layers=4)
    return str(large), str(small)


def rise(world: World, name: str, large: str, small: str) -> tuple[int, int]:
    """How far memory rises above where it was while the engine is built, and the share it holds."""
    chosen = TypeAdapter(Strategy).validate_json(json.dumps(STRATEGIES[name]))
    setup = EngineSetup("fp32", OptimizerSetup("sgd"), Schedule("constant", 0.1, 0, 9), None, 0)

    def build(folder: str) -> int:
        section = ModelSection(name=folder)
        plan = ModelBlueprint(section, LoRA(rank=4), TrainSection(precision="fp32"))
        with chosen.build(plan, setup, world) as engine:
            return engine.held().of("params")

    build(small)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest mark so far
    held = build(large)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before, held


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", STRATEGIES)
def test_peak_of_loading_on_four_ranks(name: str, folders: tuple[str, str]) -> None:
    if name == "zero3":
        pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
    for risen, held in on_ranks(4, rise, name, *folders):
        assert held < LAYERS * LAYER / 4 + 4 * MIB  # adapters, embedding, head
        most = SHARES[name] * held + 2 * LAYER + CONSTANT
        assert risen < most < LAYERS * LAYER, f"{risen / MIB:.0f}, holds {held / MIB:.0f} MiB"
