"""FSDP2 around the steps themselves, which `tests/conformance` compares: evaluation, resuming, and
the loss scale of fp16.

The reference is the same sequence in one process, or under DDP.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardtune.config.job import LoRA, NoAdapter
from shardtune.core.world import World
from shardtune.engine.dtensor import local
from tests.models.families import write
from tests.parallel.test_pipeline_engine import Case, batch, build, step
from tests.ranks import on_ranks

KEPT = {"type": "fsdp", "reshard_after_forward": False}


def looking(world: World, case: Case) -> tuple[list[float], dict[Any, int]]:
    """Losses and gradient norms of three steps, with a look at the model before each of them."""
    found = []
    with build(world, case) as engine:
        for number in range(3):
            result = engine.step(step(number))
            found += [result.loss, result.grad_norm]
            engine.evaluate("held out", [batch(7, 2, 16)])
        return found, dict(engine.held().bytes)


def resuming(world: World, case: Case) -> list[float]:
    """The loss of a step after an earlier state has been loaded into a model that was used."""
    probe = batch(9, 1, 12)
    with build(world, case) as engine:
        tensors, numbers = engine.state()
        earlier = {key: value.clone() for key, value in tensors.items()}
        results = [engine.step(step(0)) for _ in range(3)]
        with torch.no_grad():
            engine.module()(
                input_ids=probe.input_ids, position_ids=probe.position_ids, use_cache=False
            )
        engine.load_state(earlier, numbers)
        return [results[0].loss, engine.step(step(0)).loss]


@pytest.mark.long
def test_an_evaluation_changes_no_step(tmp_path: Path) -> None:
    """Gathered weights that stay must not hide the shares, nor their gradients, from a step."""
    write(tmp_path, "llama")
    ((expected, whole),) = on_ranks(1, looking, Case(str(tmp_path), NoAdapter()))
    for found, held in on_ranks(2, looking, Case(str(tmp_path), NoAdapter(), KEPT)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert held["params", "gpu"] < 0.51 * whole["params", "gpu"]


@pytest.mark.long
def test_a_loaded_state_is_what_the_next_step_computes_with(tmp_path: Path) -> None:
    """A run looks at its model (packed documents must stay apart) before it loads a checkpoint."""
    write(tmp_path, "llama")
    for first, again in on_ranks(2, resuming, Case(str(tmp_path), NoAdapter(), KEPT)):
        assert again == pytest.approx(first, rel=1e-6)


# The loss scale of fp16 --------------------------------------------------------------------------


def scaled(world: World, case: Case) -> dict[str, Any]:
    """Six steps in fp16, of which the third overflows in what the last rank holds alone, and the
    sixth again after a save and a load."""

    def taken(engine: Any, number: int) -> Any:
        return engine.step([batch(10 * world.rank + number, 2, 16)])

    with build(world, case) as engine:
        results = [taken(engine, number) for number in range(2)]
        before = {name: weight.clone() for name, weight in engine.trained_weights()}
        reduce = engine.gradients.reduce

        def spoiled() -> None:
            reduce()
            if world.rank == world.size - 1 or case.settings is None:  # DDP's are alike everywhere
                local(next(iter(engine.gradients.parameters.gradients().values()))).fill_(math.inf)

        engine.gradients.reduce = spoiled
        results.append(taken(engine, 2))
        engine.gradients.reduce = reduce
        kept = all(torch.equal(before[name], weight) for name, weight in engine.trained_weights())
        results += [taken(engine, number) for number in (3, 4)]
        tensors, numbers = engine.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        results.append(taken(engine, 5))
    with build(world, case) as engine:
        engine.load_state(tensors, numbers)
        again = taken(engine, 5)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results if result.applied],
        "applied": [result.applied for result in results],
        "kept": kept,
        "numbers": numbers,
        "again": (again.loss, again.grad_norm) == (results[5].loss, results[5].grad_norm),
    }


def side_by_side(world: World, *cases: Case) -> list[dict[str, Any]]:
    return [scaled(world, case) for case in cases]


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(NoAdapter(), id="all"),
        pytest.param(LoRA(rank=4), id="lora", marks=pytest.mark.long),
    ],
)
def test_fp16_scales_the_loss_as_ddp_does(adapter: NoAdapter | LoRA, tmp_path: Path) -> None:
    """An infinity that one rank alone can see leaves the step out on all, and halves the scale."""
    write(tmp_path, "llama")
    copies, shards = (
        Case(str(tmp_path), adapter, settings, precision="fp16")
        for settings in (None, {"type": "fsdp"})
    )
    for whole, divided in on_ranks(2, side_by_side, copies, shards):
        assert divided["applied"] == whole["applied"] == [True, True, False, True, True, True]
        assert divided["kept"]
        assert divided["numbers"] == whole["numbers"] == {"taken": 5, "scale": 2**15, "growth": 2}
        assert divided["again"]
        # FSDP2 gathers the embedding in fp16, too, which autocast leaves in fp32: 11 bits.
        np.testing.assert_allclose(divided["losses"], whole["losses"], rtol=5e-4)
        np.testing.assert_allclose(divided["norms"], whole["norms"], rtol=5e-3)
