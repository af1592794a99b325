"""FSDP2 around the steps themselves, which `tests/conformance` compares: evaluation and resuming.

The reference is the same sequence in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardtune.config.job import NoAdapter
from shardtune.core.world import World
from tests.models.families import write
from tests.parallel.test_pipeline_engine import Case, batch, build, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.long

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


def test_an_evaluation_changes_no_step(tmp_path: Path) -> None:
    """Gathered weights that stay must not hide the shares, nor their gradients, from a step."""
    write(tmp_path, "llama")
    ((expected, whole),) = on_ranks(1, looking, Case(str(tmp_path), NoAdapter()))
    for found, held in on_ranks(2, looking, Case(str(tmp_path), NoAdapter(), KEPT)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert held["params", "gpu"] < 0.51 * whole["params", "gpu"]


def test_a_loaded_state_is_what_the_next_step_computes_with(tmp_path: Path) -> None:
    """A run looks at its model (packed documents must stay apart) before it loads a checkpoint."""
    write(tmp_path, "llama")
    for first, again in on_ranks(2, resuming, Case(str(tmp_path), NoAdapter(), KEPT)):
        assert again == pytest.approx(first, rel=1e-6)
