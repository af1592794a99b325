"""A micro-batch that gives NaN: under every strategy no weight moves, and its samples are named."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from pydantic import TypeAdapter

from shardtune.checkpoint.digest import digest_tensors
from shardtune.core.world import World
from shardtune.parallel import Strategy
from tests.conformance.guarantees import builder, setup
from tests.conformance.table import MICRO_BATCH, STAGES, STRATEGIES
from tests.numerics.test_factorisations import loader
from tests.ranks import on_ranks

SPOILT = 2
"""The micro-batch, counted from 1, whose logits are no numbers."""


def spoilt_step(world: World, strategy: str) -> dict[str, Any]:
    """A good step, one with a micro-batch of NaN on the last data rank, and another good one."""
    settings = (STRATEGIES | STAGES)[strategy][0]
    chosen = TypeAdapter(Strategy).validate_json(json.dumps(settings))
    mesh = chosen.mesh(world.size)
    data_rank, data_ranks = mesh.data_rank(world.rank), mesh.data_ranks
    steps = list(loader(True, data_rank, data_ranks, MICRO_BATCH).steps(0, 3))
    with chosen.build(builder("tiny", "full"), setup(data_ranks), world) as engine:
        engine.step(steps[0])
        before = digest_tensors(engine.state()[0])
        passed: list[None] = []

        def spoil(module: Any, inputs: Any, logits: Any) -> Any:
            passed.append(None)
            return logits * float("nan") if len(passed) == SPOILT else logits

        handle = None
        if data_rank == data_ranks - 1:
            handle = engine.module().get_output_embeddings().register_forward_hook(spoil)
        result = engine.step(steps[1])
        blamed = engine.offending_samples(2, steps[1], result)
        if handle is not None:
            handle.remove()
        after = digest_tensors(engine.state()[0])
        broken = engine.nonfinite_weights()
        last = engine.step(steps[2])
        return {
            "applied": result.applied,
            "moved": after != before,
            "blamed": blamed,
            "guilty": steps[1][SPOILT - 1].samples if handle is not None else (),
            "broken": broken,
            "goes on": last.applied,
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "tensor2", "pipeline2-1f1b", "zero0", "zero1", "zero2", "zero3"]
)
def test_no_weight_moves_and_the_samples_are_named(strategy: str) -> None:
    if strategy.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("needs shardtune[deepspeed]")
    found = on_ranks(2, spoilt_step, strategy)
    for each in found:
        assert not each["applied"]
        assert not each["moved"]
        assert each["broken"] == ()
        assert each["goes on"]
    named = {sample for each in found for sample in each["blamed"]}
    assert named == {sample for each in found for sample in each["guilty"]}
    assert named
