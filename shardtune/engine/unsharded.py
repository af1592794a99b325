"""The null object of tensor parallelism: what a sharded model adds to a step, for a whole one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardtune.engine.loss import loss_sum
from shardtune.engine.shards import ShardRegions, shard_place


class Unsharded:
    """A model whose layers are whole: what tensor-parallel shards would have to add to a step."""

    whole_logits = True
    """Whether a rank computes all logits of its tokens, so that head and loss may be one."""

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over label tokens."""
        return loss_sum(logits, targets)

    def reduce_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Sums, in place, the gradients that the ranks of one layer have computed in parts."""

    def unshuffled(self, name: str, whole: Tensor) -> Tensor:
        """A weight as the model has it, from the ranks' shards side by side."""
        return whole

    def regions(self, name: str, weight: Tensor) -> ShardRegions:
        """Where this rank's shard of a weight lies in the weight as the model has it."""
        return ShardRegions(0, [shard_place(weight).region])
