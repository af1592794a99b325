"""DDP and weights that have no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.errors import ModelError
from shardtune.parallel.ddp.engine import MetGradients


def test_a_gradient_that_no_other_rank_hears_of_is_refused() -> None:
    """DDP was told not to wait for it: with it, the ranks' replicas would drift apart."""
    model = nn.Linear(2, 2)
    gradients = MetGradients(TrainedParameters.of(model))
    gradients.unreached = {"bias"}
    model.weight.grad = torch.ones(2, 2)
    gradients.reduce()
    model.bias.grad = torch.ones(2)
    with pytest.raises(ModelError, match="bias among them") as caught:
        gradients.reduce()
    assert "fsdp" in caught.value.problems[0].fix
