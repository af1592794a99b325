"""Gradient reduction and norm: what stands between the backward pass and the update."""

from __future__ import annotations

from torch import Tensor, nn

from shardtune.engine.dtensor import whole
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.engine.unsharded import Unsharded


class GradientReduction:
    """The all-reduce and the norm of gradients. Where ranks hold parts, a subclass says how."""

    def __init__(self, parameters: TrainedParameters, sharded: Unsharded | None = None) -> None:
        self.parameters = parameters
        self.sharded = sharded or Unsharded()

    def reduce(self) -> None:
        """Brings gradients together that have not met in the backward pass."""
        self.sharded.reduce_gradients(self.parameters.gradients())

    def norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        return whole(nn.utils.get_total_norm(self.parameters.gradients().values()))
