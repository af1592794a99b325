"""What data parallelism declares."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardtune.core.layout import Move
from shardtune.parallel.ddp.strategy import DDP


def test_nothing_is_divided_and_gradients_travel_once_a_step() -> None:
    strategy = DDP()
    mesh, layout = strategy.mesh(4), strategy.layout()
    assert mesh.axes == (("data", 4),)
    for state in ("params", "grads", "optim", "activations"):
        assert layout.divisor(state, mesh) == 1
    assert layout.moves(mesh) == (("data", Move("all_reduce", "grads", "step")),)


def test_one_rank_sends_nothing() -> None:
    assert DDP().layout().moves(DDP().mesh(1)) == ()


def test_it_has_no_stage() -> None:
    with pytest.raises(ValidationError, match="stage"):
        DDP.model_validate({"type": "ddp", "stage": 2})
