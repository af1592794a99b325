"""What layers compute twice changes no step, whether the ranks share the weights or have copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardtune.core.world import World
from shardtune.job import LoRA, NoAdapter
from tests.engines.test_pipeline import Case, build, step
from tests.models.families import write
from tests.ranks import on_ranks


def steps(world: World, case: Case) -> list[float]:
    with build(world, case) as engine:
        results = [engine.step(step(number)) for number in range(2)]
    return [number for result in results for number in (result.loss, result.grad_norm)]


@pytest.mark.parametrize("what", ["mlp", "most"])
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRA(rank=4)], ids=["all", "lora"])
def test_on_two_ranks_as_without(tmp_path: Path, what: str, adapter: NoAdapter | LoRA) -> None:
    write(tmp_path, "llama")
    ((expected),) = on_ranks(1, steps, Case(str(tmp_path), adapter))
    for strategy in (
        {"type": "ddp"},
        {"type": "fsdp"},
        {"type": "fsdp", "reshard_after_forward": False},
    ):
        for found in on_ranks(2, steps, Case(str(tmp_path), adapter, strategy, checkpointing=what)):
            np.testing.assert_allclose(found, expected, rtol=1e-5)
