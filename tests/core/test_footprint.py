"""Bytes by layout: the ZeRO paper's own example, and what crosses which axis."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from shardtune.core.footprint import ModelBytes, predict_held, predict_sent
from shardtune.parallel import Strategy

# 7.5 billion parameters, mixed precision with Adam: 2 + 2 + 12 bytes each (figure 1 of the paper).
WHOLE = ModelBytes(
    params=15_000_000_000, trained=15_000_000_000, grads=15_000_000_000, optim=90_000_000_000
)


def strategy(settings: dict[str, Any]) -> Any:
    return TypeAdapter(Strategy).validate_json(json.dumps(settings))


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"type": "deepspeed", "zero_optimization": {"stage": stage, **settings}}


@pytest.mark.parametrize(
    ("settings", "gigabytes", "sent"),
    [
        ({"type": "ddp"}, 120.0, 2),
        (zero(1), 31.4, 2),
        (zero(2), 16.6, 2),
        (zero(3), 1.9, 3),
        ({"type": "fsdp"}, 1.9, 3),
    ],
)
def test_figure_1_of_the_zero_paper(
    settings: dict[str, Any], gigabytes: float, sent: float
) -> None:
    chosen = strategy(settings)
    mesh = chosen.mesh(64)
    held = predict_held(chosen.layout().without_masters(), mesh, WHOLE)
    total = sum(held.of(state) for state in ("params", "grads", "optim"))
    assert round(total / 1e9, 1) == gigabytes
    moved = predict_sent(chosen.layout(), mesh, WHOLE, microbatches=1)
    twice = {"all_reduce": 2}  # a reduce-scatter and an all-gather
    assert sum(size * twice.get(op, 1) for op, size in moved.items()) / WHOLE.params == sent


def test_accumulation_makes_only_full_sharding_send_more() -> None:
    for settings, factor in (({"type": "ddp"}, 1), (zero(1), 1), ({"type": "fsdp"}, 4)):
        chosen = strategy(settings)
        one, four = (
            sum(predict_sent(chosen.layout(), chosen.mesh(8), WHOLE, microbatches=n).values())
            for n in (1, 4)
        )
        assert four == factor * one


def test_hybrid_sharding_sends_only_its_share_between_groups() -> None:
    chosen = strategy({"type": "fsdp", "sharding": "hybrid", "replicas": 8})
    sent = predict_sent(chosen.layout(), chosen.mesh(64), WHOLE, microbatches=1)
    assert sent["all_reduce"] == WHOLE.grads // 8


def test_offload_moves_bytes_elsewhere() -> None:
    chosen = strategy(zero(3, offload_optimizer={"device": "cpu"}))
    held = predict_held(chosen.layout(), chosen.mesh(1), WHOLE)
    assert held.bytes["params", "gpu"] == WHOLE.params
    assert held.bytes["optim", "cpu"] == WHOLE.optim + WHOLE.trained
    assert held.bytes["grads", "cpu"] == WHOLE.grads
