"""What is decided about CUDA graphs before any is recorded; needs no GPU."""

from __future__ import annotations

import torch
from torch import nn

from shardtune.engine.cuda_graphs import RecordedSteps
from shardtune.engine.gradient_reduction import GradientReduction
from shardtune.engine.host_to_device import Staged
from shardtune.engine.optimizer_update import OptimizerUpdate
from shardtune.engine.trained_parameters import TrainedParameters


def test_no_shape_is_recorded_before_the_moments_are_there() -> None:
    """A graph keeps its memory: what the first update allocates would come too late."""
    model = nn.Linear(3, 2)
    parameters = TrainedParameters.of(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    update = OptimizerUpdate(
        optimizer, torch.amp.GradScaler("cpu", enabled=False), GradientReduction(parameters), None
    )
    ids = torch.zeros(1, 4, dtype=torch.long)
    batch = Staged(ids, ids, ids, ("a",), 4, 4, kept=torch.arange(4))
    steps = RecordedSteps(parameters, update, lambda _: model.weight.sum(), torch.device("cpu"))
    with steps.measured(batch):
        model(torch.ones(1, 3)).sum().backward()
    assert not optimizer.state
    assert not steps.is_known(batch)
    steps.update(0.1)
    assert len(optimizer.state) == len(parameters.named)
    assert steps.is_known(batch)
