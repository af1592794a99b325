"""What is decided about CUDA graphs before any is recorded; needs no GPU."""

from __future__ import annotations

import torch
from torch import nn

from shardtune.core.setup import captured_tokens
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
    steps = RecordedSteps(parameters, update, lambda _: model.weight.sum(), torch.device("cpu"), 8)
    with steps.measured(batch):
        model(torch.ones(1, 3)).sum().backward()
    assert not optimizer.state
    assert not steps.is_known(batch)
    steps.update(0.1)
    assert len(optimizer.state) == len(parameters.named)
    assert steps.is_known(batch)


def test_long_steps_of_all_weights_are_not_recorded() -> None:
    """A GPU is busy with them for longer than the host, and a graph keeps a place for gradients."""
    assert captured_tokens(8_000_000_000, all_trained=False) == 8192
    assert captured_tokens(1_236_000_000, all_trained=True) == 8090
    assert captured_tokens(3_213_000_000, all_trained=True) == 3112
    assert captured_tokens(135_000_000, all_trained=True) == 8192


def test_small_models_with_adapters_are_recorded_for_longer_micro_batches() -> None:
    """The host takes as long for each of their layers, and a GPU much less."""
    assert captured_tokens(1_236_000_000, all_trained=False) == 8192
    assert captured_tokens(494_000_000, all_trained=False) == 20_242
