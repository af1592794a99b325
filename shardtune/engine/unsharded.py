"""The null object of tensor parallelism: what a sharded model adds to a step, for a whole one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardtune.engine.loss import loss_sum
from shardtune.engine.shards import Boxes, place_of


class Unsharded:
    """A model whose layers are whole: what the slices of one would have to add to a step."""

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over label tokens."""
        return loss_sum(logits, targets)

    def meet(self, gradients: Mapping[str, Tensor]) -> None:
        """Adds up, in place, what the ranks of a slice have computed in parts."""

    def in_order(self, name: str, whole: Tensor) -> Tensor:
        """A weight as the model has it, from the ranks' slices side by side."""
        return whole

    def boxes(self, name: str, weight: Tensor) -> Boxes:
        """Where this rank's share of a weight lies in the weight as the model has it."""
        return Boxes(0, [place_of(weight).cut])
